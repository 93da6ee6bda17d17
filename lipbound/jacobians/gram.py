r"""The matrix :math:`G = J J^T` block by block, in closed form and in float64: what bounds and
deterministic certificates are made of.

The formula and its symbols: Lemma 7 (docs/theory/jacobian.md). One head, all heads side by side,
and the layer with its output projection are the same matrix under different ways of stacking the
blocks.
"""

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.matrix_norms import gamma

TILE = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of one tile of G and of the arrays it is made from: what a core's cache holds, and what
keeps a GPU busy."""


class Gram:
    """J J^T of some heads of one sample; padding tokens are left out.

    Args:
        att: the layer; its P, q, k, v are cast to float64 as they are.
        sample: which input.
        heads: one head for a "head" map, all of them for a whole layer.
        w_o: (len(heads), d_v, D_out) to project and add the heads' outputs, None to set them side
            by side.

    Attributes:
        tokens: N, padding left out. width: size w of a block, d_v times the number of heads, or
            D_out.
    """

    covers: Collection[str] = ()
    """Variants of attention that the closed form is about."""

    def __init__(self, att: Attention, sample: int, heads: list[int], w_o: Tensor | None = None):
        att.only("the closed form of J J^T", self.covers)
        keep = slice(None) if att.valid is None else att.valid[sample]
        self.keep = keep
        self._p = att.p[sample, heads][:, keep][..., keep].double()
        self._t = (
            self._p
            if not att.scoring.sloped
            else att.weights[sample, heads][:, keep][..., keep].double()
        )
        self._q, k, self._v = (
            t[sample, heads][:, keep].double() for t in (att.q, att.centred_k, att.centred_v)
        )
        self._o = self._p @ self._v
        self._w = {
            name: w[heads].double() for name, w in (("q", att.w_q), ("k", att.w_k), ("v", att.w_v))
        }
        self._scale, self._w_o = att.scale, None if w_o is None else w_o.double()
        self.heads, self.tokens, self._d_v = len(heads), self._p.shape[1], att.d_v
        self.width = self.heads * att.d_v if w_o is None else w_o.shape[2]
        self.device = att.device
        rows = range(0, self.tokens, self._step())
        # C_i = A_i K, through the same v_j - o_i as everywhere: other roundings of them would make
        # parts of G disagree
        parts = [
            [self._a(h, slice(i, i + self._step())) @ k[h] for i in rows] for h in range(self.heads)
        ]
        self._c = torch.stack([torch.cat(part) for part in parts])
        lengths = [
            torch.cat([self._a(h, slice(i, i + self._step())).norm(dim=1) for i in rows])
            for h in range(self.heads)
        ]
        self._error = self._rounding(torch.stack(lengths), k, att.x.shape[2])

    # -- what it is made of ------------------------------------------------------------------------

    def _a(self, h: int, rows: slice) -> Tensor:
        """A_i of head h for some tokens, (rows, d_v, N)."""
        return self._t[h, rows, None] * (self._v[h].mT - self._o[h, rows, :, None])

    def _product(self, a: str, h: int, b: str, g: int) -> Tensor:
        """W_a^T W_b of heads h and g."""
        return self._w[a][h].mT @ self._w[b][g]

    def _rounding(self, lengths: Tensor, k: Tensor, inputs: int) -> float:
        """Bound on the 2-norm of the rounding error of G, given its arrays P, v - o, q, k and the
        weights.

        Lemma 54 (docs/theory/numerics.md), where ``part`` is called pi: a bound on a head's
        Jacobian with absolute values inside.
        """
        total = 0.0
        for h in range(self.heads):
            w_q, w_k, w_v = (float(self._w[name][h].norm()) for name in "qkv")
            part = (
                abs(self._scale)
                * w_k
                * float((lengths[h].norm(dim=1) * self._q[h].norm(dim=1)).norm())
            )
            part += float(self._p[h].norm()) * w_v
            part += abs(self._scale) * w_q * float((lengths[h] @ k[h].norm(dim=1)).norm())
            total += part * (1.0 if self._w_o is None else float(self._w_o[h].norm()))
        outer = 0 if self._w_o is None else 2 * self.heads * self._d_v
        return (
            gamma(2 * self.tokens + inputs + 2 * self._w["q"].shape[2] + self._d_v + outer + 20)
            * total**2
        )

    @property
    def error(self) -> float:
        """Bound on the 2-norm of the rounding error of G."""
        return self._error

    # -- blocks ------------------------------------------------------------------------------------

    def _step(self) -> int:
        """Tokens in a tile."""
        d = self.heads * self._d_v if self._w_o is not None else 0
        block = 8 * (max(self.width, d) ** 2 + d * self.width)
        budget = TILE.get(self.device.type, TILE["cpu"])
        return max(
            1,
            min(
                self.tokens,
                int((budget / block) ** 0.5),
                int(budget // (8 * self._d_v * self.tokens)),
            ),
        )

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """Blocks (i, k) of G for tokens i in ``rows`` and k in ``cols``: (rows, width, cols,
        width)."""
        if self.heads == 1 and self._w_o is None:
            return self._pair(0, 0, rows, cols)
        heads = range(self.heads)
        stacked = torch.cat(
            [torch.cat([self._pair(h, g, rows, cols) for g in heads], 3) for h in heads], 1
        )
        if self._w_o is None:
            return stacked
        w_o = self._w_o.flatten(0, 1)
        return ((stacked @ w_o).transpose(1, 3) @ w_o).transpose(1, 3)

    def _pair(self, h: int, g: int, rows: slice, cols: slice) -> Tensor:
        """The blocks of heads h and g, (rows, d_v, cols, d_v)."""
        c, n, d = self._scale, self.tokens, self._d_v
        p_r, p_c, q_r, q_c, c_r, c_c = (
            self._p[h, rows],
            self._p[g, cols],
            self._q[h, rows],
            self._q[g, cols],
            self._c[h, rows],
            self._c[g, cols],
        )
        a_r, a_c = self._a(h, rows).reshape(-1, n), self._a(g, cols).reshape(-1, n)
        out = (a_r @ a_c.mT).view(len(p_r), d, len(p_c), d)
        out *= (c**2 * q_r @ self._product("k", h, "k", g) @ q_c.mT)[:, None, :, None]
        out.addcmul_(
            (p_r @ p_c.mT)[:, None, :, None], self._product("v", h, "v", g)[None, :, None, :]
        )

        z_r, z_c = c * q_r @ self._product("k", h, "v", g), c * q_c @ self._product("k", g, "v", h)
        out.addcmul_((a_r @ p_c.mT).view(-1, d, len(p_c), 1), z_r[:, None, None, :])
        out.addcmul_(
            z_c.mT[None, :, :, None], (a_c @ p_r.mT).view(-1, d, len(p_r)).permute(2, 0, 1)[:, None]
        )

        back, ahead = self._p[g, cols, rows].mT, self._p[h, rows, cols]  # P_ki and P_ik
        b_r, b_c = c * c_r @ self._product("q", h, "v", g), c * c_c @ self._product("q", g, "v", h)
        out.addcmul_(back[:, None, :, None], b_r[:, :, None, :])
        out.addcmul_(ahead[:, None, :, None], b_c.permute(2, 0, 1)[None])

        m_r = (
            c_r.reshape(-1, c_r.shape[-1]) @ (c**2 * self._product("q", h, "k", g) @ q_c.mT)
        ).view(-1, d, len(p_c))
        m_c = (
            c_c.reshape(-1, c_c.shape[-1]) @ (c**2 * self._product("q", g, "k", h) @ q_r.mT)
        ).view(-1, d, len(p_r))
        out.addcmul_(
            (back[:, None] * m_r)[..., None],
            (self._v[g, rows][:, None] - self._o[g, cols][None])[:, None],
        )
        forth = ahead[..., None] * (
            self._v[h, cols][None] - self._o[h, rows][:, None]
        )  # (rows, cols, d)
        out.addcmul_(forth.transpose(1, 2)[..., None], m_c.permute(2, 0, 1)[:, None])

        tokens = torch.arange(n, device=self.device)
        i, k = (tokens[rows, None] == tokens[None, cols]).nonzero(as_tuple=True)
        if len(i):
            out[i, :, k] += c**2 * c_r[i] @ self._product("q", h, "q", g) @ c_c[k].mT
        return out

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles on and above the diagonal: G is symmetric."""
        step = self._step()
        starts = range(0, self.tokens, step)
        for i in starts:
            for k in starts[i // step :]:
                rows, cols = (
                    slice(i, min(i + step, self.tokens)),
                    slice(k, min(k + step, self.tokens)),
                )
                yield rows, cols, self.tile(rows, cols)

    def apply(self, y: Tensor) -> Tensor:
        """G y for r vectors at a time, (N, width, r) -> (N, width, r), from the same arrays as the
        tiles."""
        step, c, r = self._step(), self._scale, y.shape[-1]
        rows = [slice(i, min(i + step, self.tokens)) for i in range(0, self.tokens, step)]
        parts = self._split(y)
        x = y.new_zeros(self.tokens, self._w["q"].shape[1], r)  # J^T y
        for h in range(self.heads):
            to_k = y.new_zeros(self.tokens, self._q.shape[2], r)
            for i in rows:
                inner = (self._a(h, i).mT @ parts[h, i]) * c  # (rows, N, r)
                to_k += torch.einsum("ijr,id->jdr", inner, self._q[h, i])
            to_q = c * self._c[h].mT @ parts[h]
            to_v = (self._p[h].mT @ parts[h].reshape(self.tokens, -1)).view_as(parts[h])
            for name, z in (("q", to_q), ("k", to_k), ("v", to_v)):
                x += self._w[name][h] @ z
        out = []
        for h in range(self.heads):
            d_q, d_k, d_v = (self._w[name][h].mT @ x for name in "qkv")
            inner = torch.cat(
                [
                    self._a(h, i) @ (c * torch.einsum("id,jdr->ijr", self._q[h, i], d_k))
                    for i in rows
                ]
            )
            out.append(
                c * self._c[h] @ d_q
                + inner
                + (self._p[h] @ d_v.reshape(self.tokens, -1)).view_as(inner)
            )
        if self._w_o is None:
            return torch.cat(out, 1)
        return torch.einsum("hvo,hnvr->nor", self._w_o, torch.stack(out))

    def _split(self, y: Tensor) -> Tensor:
        """Cotangents of every head's outputs, (heads, N, d_v, r)."""
        if self._w_o is None:
            return y.view(self.tokens, self.heads, self._d_v, -1).transpose(0, 1)
        return torch.einsum("hvo,nor->hnvr", self._w_o, y)
