r"""The matrix :math:`G = J J^T` block by block, in closed form and in float64.

Deterministic certificates are made of it. The formula and its symbols: Lemma 7
(docs/theory/jacobian.md). One head, all heads side by side, and the layer with its output
projection are the same matrix under different ways of stacking the blocks. For one head with
variants: Lemma 8 (docs/theory/jacobian.md), where :math:`D^a_j` maps a perturbation of token j to
that of its query, key or value (`lipbound.jacobians.token_tangents`), and
:math:`M^{ab}_j = D^a_j D^{bT}_j`.
"""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import LINEAR_VALUES, titles
from lipbound.attention.variants.relative_keys import RelativeKeys
from lipbound.errors import AttentionError
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import gamma

TILE = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of one tile of G and of the arrays it is made from: what a core's cache holds, and what
keeps a GPU busy."""


def covered(att: Attention, heads: list[int], w_o: Tensor | None = None) -> None:
    """Check that J J^T of these heads together has a closed form here.

    Raises:
        AttentionError: several heads, or projected ones, with variants.
    """
    if att.variants and (len(heads) > 1 or w_o is not None):
        raise AttentionError(
            f"J J^T of a layer with {titles(att.variants)} has a closed form one head at a time "
            "only; use map='head' or 'head_out', or method 'lanczos' with delta"
        )


def gram_of(att: Attention, sample: int, heads: list[int], w_o: Tensor | None = None) -> "Gram":
    """J J^T of some heads of one sample of any layer; those with variants must be `covered`."""
    covered(att, heads, w_o)
    return VariantGram(att, sample, heads[0]) if att.variants else Gram(att, sample, heads, w_o)


class Gram:
    """J J^T of some heads of one sample; padding tokens are left out.

    Args:
        att: the layer; its P, q, k, v are cast to float64 as they are.
        sample: which input.
        heads: one head for a "head" map, all of them for a whole layer.
        w_o: (len(heads), d_v, D_out) to project and add the heads' outputs, None to set them side
            by side.

    Attributes:
        tokens: N, padding left out.
        width: size w of a block, d_v times the number of heads, or D_out.
        error: bound on the 2-norm of the rounding error of G.
    """

    covers: Collection[str] = ()
    """Variants of attention that the closed form is about."""

    def __init__(self, att: Attention, sample: int, heads: list[int], w_o: Tensor | None = None):
        att.only("the closed form of J J^T", self.covers)
        self.keep = keep = slice(None) if att.valid is None else att.valid[sample]

        def kept(w: Tensor) -> Tensor:
            return w[sample, heads][:, keep][..., keep].double()

        self._p = kept(att.p)
        self._t = kept(att.weights) if att.scoring.sloped else self._p
        self._q, k, self._v = (
            t[sample, heads][:, keep].double() for t in (att.q, att.centred_k, att.centred_v)
        )
        self._o = self._p @ self._v
        weights = (("q", att.w_q), ("k", att.w_k), ("v", att.w_v))
        self._w = {name: w[heads].double() for name, w in weights}
        self._scale, self._w_o = att.scale, None if w_o is None else w_o.double()
        self.heads, self.tokens, self._d_v = len(heads), self._p.shape[1], att.d_v
        self.width = self.heads * att.d_v if w_o is None else w_o.shape[2]
        self.device = att.device
        rows = self._rows()

        # C_i = A_i K, through the same v_j - o_i as everywhere: other roundings of them would make
        # parts of G disagree
        def of_all(form: Callable[[int, slice], Tensor]) -> Tensor:
            return torch.stack([torch.cat([form(h, i) for i in rows]) for h in range(self.heads)])

        self._c = of_all(lambda h, i: self._a(h, i) @ k[h])
        lengths, keys = of_all(lambda h, i: self._a(h, i).norm(dim=1)), k.norm(dim=-1)
        if (relative := att.scoring.find(RelativeKeys)) is not None:  # one head
            r = relative.of_head(heads[0])[keep][:, keep]
            self._c = of_all(lambda h, i: self._a(h, i) @ (k[h] + r[i]))
            keys = keys + r.norm(dim=-1).amax(0)
        self.error = self._rounding(lengths, keys, att.x.shape[2])

    # -- what it is made of ------------------------------------------------------------------------

    def _a(self, h: int, rows: slice) -> Tensor:
        """A_i of head h for some tokens, (rows, d_v, N)."""
        return self._t[h, rows, None] * (self._v[h].mT - self._o[h, rows, :, None])

    def _product(self, a: str, h: int, b: str, g: int) -> Tensor:
        """W_a^T W_b of heads h and g."""
        return self._w[a][h].mT @ self._w[b][g]

    def _rounding(self, lengths: Tensor, keys: Tensor, inputs: int) -> float:
        """Bound on the 2-norm of the rounding error of G, given P, v - o, q, k and the weights.

        Lemma 54 (docs/theory/numerics.md), where ``part`` is called pi: a bound on a head's
        Jacobian with absolute values inside. ``keys``: lengths of keys, (heads, N).
        """
        total, c = 0.0, abs(self._scale)
        for h in range(self.heads):
            w_q, w_k, w_v = (float(self._w[name][h].norm()) for name in "qkv")
            reach = (lengths[h].norm(dim=1) * self._q[h].norm(dim=1)).norm()
            part = c * w_k * float(reach) + float(self._p[h].norm()) * w_v
            part += c * w_q * float((lengths[h] @ keys[h]).norm())
            total += part * (1.0 if self._w_o is None else float(self._w_o[h].norm()))
        outer = 0 if self._w_o is None else 2 * self.heads * self._d_v
        d = self._w["q"].shape[2]
        return gamma(2 * self.tokens + inputs + 2 * d + self._d_v + outer + 20) * total**2

    # -- blocks ------------------------------------------------------------------------------------

    def _step(self) -> int:
        """Tokens in a tile."""
        d = self.heads * self._d_v if self._w_o is not None else 0
        block = 8 * (max(self.width, d) ** 2 + d * self.width)
        budget = TILE.get(self.device.type, TILE["cpu"])
        step = min((budget / block) ** 0.5, budget // (8 * self._d_v * self.tokens))
        return max(1, min(self.tokens, int(step)))

    def _rows(self) -> list[slice]:
        """The tokens, a tile at a time."""
        step = self._step()
        return [slice(i, min(i + step, self.tokens)) for i in range(0, self.tokens, step)]

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """Blocks (i, k) of G for tokens i in ``rows`` and k in ``cols``.

        (rows, width, cols, width).
        """
        if self.heads == 1 and self._w_o is None:
            return self._pair(0, 0, rows, cols)
        heads = range(self.heads)
        lines = [torch.cat([self._pair(h, g, rows, cols) for g in heads], 3) for h in heads]
        stacked = torch.cat(lines, 1)
        if self._w_o is None:
            return stacked
        w_o = self._w_o.flatten(0, 1)
        return ((stacked @ w_o).transpose(1, 3) @ w_o).transpose(1, 3)

    def _pair(self, h: int, g: int, rows: slice, cols: slice) -> Tensor:
        """The blocks of heads h and g, (rows, d_v, cols, d_v)."""
        c, n, d = self._scale, self.tokens, self._d_v
        p_r, q_r, c_r = (t[h, rows] for t in (self._p, self._q, self._c))
        p_c, q_c, c_c = (t[g, cols] for t in (self._p, self._q, self._c))
        a_r, a_c = self._a(h, rows).reshape(-1, n), self._a(g, cols).reshape(-1, n)
        out = (a_r @ a_c.mT).view(len(p_r), d, len(p_c), d)
        out *= (c**2 * q_r @ self._product("k", h, "k", g) @ q_c.mT)[:, None, :, None]
        values = self._product("v", h, "v", g)
        out.addcmul_((p_r @ p_c.mT)[:, None, :, None], values[None, :, None, :])

        z_r, z_c = c * q_r @ self._product("k", h, "v", g), c * q_c @ self._product("k", g, "v", h)
        out.addcmul_((a_r @ p_c.mT).view(-1, d, len(p_c), 1), z_r[:, None, None, :])
        reached = (a_c @ p_r.mT).view(-1, d, len(p_r)).permute(2, 0, 1)
        out.addcmul_(z_c.mT[None, :, :, None], reached[:, None])

        back, ahead = self._p[g, cols, rows].mT, self._p[h, rows, cols]  # P_ki and P_ik
        b_r, b_c = c * c_r @ self._product("q", h, "v", g), c * c_c @ self._product("q", g, "v", h)
        out.addcmul_(back[:, None, :, None], b_r[:, :, None, :])
        out.addcmul_(ahead[:, None, :, None], b_c.permute(2, 0, 1)[None])

        m_r = c**2 * self._product("q", h, "k", g) @ q_c.mT
        m_c = c**2 * self._product("q", g, "k", h) @ q_r.mT
        m_r = (c_r.reshape(-1, c_r.shape[-1]) @ m_r).view(-1, d, len(p_c))
        m_c = (c_c.reshape(-1, c_c.shape[-1]) @ m_c).view(-1, d, len(p_r))
        apart = self._v[g, rows][:, None] - self._o[g, cols][None]
        out.addcmul_((back[:, None] * m_r)[..., None], apart[:, None])
        forth = self._v[h, cols][None] - self._o[h, rows][:, None]
        forth = ahead[..., None] * forth  # (rows, cols, d)
        out.addcmul_(forth.transpose(1, 2)[..., None], m_c.permute(2, 0, 1)[:, None])

        tokens = torch.arange(n, device=self.device)
        i, k = (tokens[rows, None] == tokens[None, cols]).nonzero(as_tuple=True)
        if len(i):
            out[i, :, k] += c**2 * c_r[i] @ self._product("q", h, "q", g) @ c_c[k].mT
        return out

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles on and above the diagonal: G is symmetric."""
        rows = self._rows()
        for i, first in enumerate(rows):
            for cols in rows[i:]:
                yield first, cols, self.tile(first, cols)

    def apply(self, y: Tensor) -> Tensor:
        """G y for r vectors at a time, (N, width, r), from the same arrays as the tiles."""
        c, r, rows, parts = self._scale, y.shape[-1], self._rows(), self._split(y)
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
            moved = (c * torch.einsum("id,jdr->ijr", self._q[h, i], d_k) for i in rows)
            inner = torch.cat([self._a(h, i) @ z for i, z in zip(rows, moved, strict=True)])
            values = (self._p[h] @ d_v.reshape(self.tokens, -1)).view_as(inner)
            out.append(c * self._c[h] @ d_q + inner + values)
        if self._w_o is None:
            return torch.cat(out, 1)
        return torch.einsum("hvo,hnvr->nor", self._w_o, torch.stack(out))

    def _split(self, y: Tensor) -> Tensor:
        """Cotangents of every head's outputs, (heads, N, d_v, r)."""
        if self._w_o is None:
            return y.view(self.tokens, self.heads, self._d_v, -1).transpose(0, 1)
        return torch.einsum("hvo,nor->hnvr", self._w_o, y)


class VariantGram(Gram):
    """J J^T of one head of one sample, any variant (none included); padding tokens are left out.

    Operations O(N^3 (d_v^2 + d) + N^3 d^2 / n) for tiles of n tokens, memory O(N (d + d_v)^2 + N^2)
    and a few tiles.

    Args:
        att: the layer; its P, weights, q, k, v and the derivative of what stands between
            projections and scores are cast to float64 as they are.
        sample: which input. head: which head.
    """

    covers = LINEAR_VALUES

    def __init__(self, att: Attention, sample: int, head: int):
        self._tangents = Tangents(att, sample, head)
        tokens = torch.arange(att.tokens, device=att.device)
        self._kept = tokens if att.valid is None else tokens[att.valid[sample]]
        super().__init__(att, sample, [head])
        c, d = self._c[0] * self._scale, self._tangents
        self._c_i = c
        parts = list(self._parts())
        if len(parts) == 1:
            d.keep(self._kept)
        self._m_kk, self._m_kv = (
            torch.cat([d.product("k", b, at).expand(len(at), -1, -1) for _, at in parts])
            for b in "kv"
        )
        self._c_k, self._c_v = (
            torch.cat([c[i] @ d.product("q", b, at) for i, at in parts]) for b in "kv"
        )
        self._own = torch.cat([c[i] @ d.product("q", "q", at) @ c[i].mT for i, at in parts])

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the tokens that are not padding, and where these stand among all.

        So many that a matrix for each of them fits a tile.
        """
        budget = TILE.get(self.device.type, TILE["cpu"])
        step = max(1, int(budget // (8 * (self._q.shape[2] + 1) ** 2)))
        for i in range(0, self.tokens, step):
            part = slice(i, min(i + step, self.tokens))
            yield part, self._kept if step >= self.tokens else self._kept[part]

    def _rounding(self, lengths: Tensor, keys: Tensor, inputs: int) -> float:
        r"""Bound on the 2-norm of the rounding error of G, in tiles or products.

        Given P, its weights, v - o, q, k and the maps of the tokens: Lemma 55
        (docs/theory/numerics.md), which counts the roundings that a product sees, in `tile` or in
        `apply`; :math:`s^a_j` is `Tangents.size`.
        """
        s_q, s_k = (
            torch.cat([self._tangents.size(a, at).expand(len(at)) for _, at in self._parts()])
            for a in "qk"
        )
        c, reach = abs(self._scale), lengths[0] * self._q[0].norm(dim=1)[:, None] * s_k
        part = float(self._p.norm()) * float(self._w["v"].norm()) + c * float(reach.norm())
        part += c * float((lengths[0] @ keys[0] * s_q).amax())
        return gamma(2 * self.tokens + inputs + 6 * self._q.shape[2] + self._d_v + 40) * part**2

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """Blocks (i, k) of G for tokens i in ``rows`` and k in ``cols``: (rows, d_v, cols, d_v)."""
        p, w_v = self._p[0], self._w["v"][0]
        out = self._keys(rows, cols)
        out.addcmul_((p[rows] @ p[cols].mT)[:, None, :, None], (w_v.mT @ w_v)[None, :, None, :])
        x = self._cross(rows, cols)
        out += x
        out += (x if rows == cols else self._cross(cols, rows)).permute(2, 3, 0, 1)
        tokens = torch.arange(self.tokens, device=self.device)
        i, k = (tokens[rows, None] == tokens[None, cols]).nonzero(as_tuple=True)
        if len(i):
            out[i, :, k] += self._own[tokens[rows][i]]
        return out

    def _slices(self, rows: int, cols: int) -> Iterator[slice]:
        """Slices of the tokens that are summed over.

        So many that what is formed for each of them fits a tile.
        """
        block = 8 * self._d_v * max(rows * cols, max(rows, cols) * max(self._d_v, self._q.shape[2]))
        step = max(1, int(TILE.get(self.device.type, TILE["cpu"]) // block))
        for j in range(0, self.tokens, step):
            yield slice(j, j + step)

    def _keys(self, rows: slice, cols: slice) -> Tensor:
        """Keys with keys, (rows, d_v, cols, d_v)."""
        q_r, q_c, a_r, a_c = self._q[0, rows], self._q[0, cols], self._a(0, rows), self._a(0, cols)
        r, k = len(q_r), len(q_c)
        out = a_r.new_zeros(r, self._d_v, k * self._d_v)
        for j in self._slices(r, k):
            inner = (self._scale * q_r) @ self._m_kk[j] @ (self._scale * q_c.mT)  # (j, i, k)
            weighted = inner.permute(1, 2, 0)[:, :, None] * a_c[None, ..., j]  # (i, k, d_v, j)
            out += a_r[..., j] @ weighted.flatten(1, 2).mT
        return out.view(r, self._d_v, k, self._d_v)

    def _cross(self, rows: slice, cols: slice) -> Tensor:
        """X_ik, (rows, d_v, cols, d_v)."""
        t, p, q, v, o = self._t[0], self._p[0], self._q[0], self._v[0], self._o[0]
        a, q_r = self._a(0, rows), q[rows]
        r, k = len(q_r), len(q[cols])
        sums = a.new_zeros(r * self._d_v**2, k)
        for j in self._slices(r, k):
            z = self._scale * (q_r @ self._m_kv[j])  # (j, i, d_v)
            pairs = a[..., j].unsqueeze(2) * z.permute(1, 2, 0)[:, None]  # (i, d_v, d_v, j)
            sums += pairs.flatten(0, 2) @ p[cols, j].mT
        out = sums.view(r, self._d_v, self._d_v, k).transpose(2, 3).contiguous()
        out.addcmul_(p[cols, rows].mT[:, None, :, None], self._c_v[rows][:, :, None])
        reached = self._scale * (self._c_k[rows] @ q[cols].mT)  # (i, d_v, k)
        back = t[cols, rows].mT[..., None] * (v[rows, None] - o[None, cols])  # A_ki, (i, k, d_v)
        return out.addcmul_(reached[..., None], back[:, None])

    def apply(self, y: Tensor) -> Tensor:
        """G y for r vectors at a time, (N, d_v, r), as J (J^T y) in the arrays of the tiles."""
        c, r, rows = self._scale, y.shape[-1], self._rows()
        q, p, c_i, d = self._q[0], self._p[0], self._c_i, self._tangents
        to_k = y.new_zeros(self.tokens, q.shape[1], r)
        for i in rows:
            to_k += torch.einsum("ijr,id->jdr", c * (self._a(0, i).mT @ y[i]), q[i])
        to_q, to_v = c_i.mT @ y, (p.mT @ y.flatten(1)).view_as(y)
        d_q, d_k, d_v = torch.empty_like(to_q), torch.empty_like(to_k), torch.empty_like(to_v)
        for i, at in self._parts():
            x = d.pull("q", to_q[i], at) + d.pull("k", to_k[i], at) + d.pull("v", to_v[i], at)
            d_q[i], d_k[i], d_v[i] = (d.push(a, x, at) for a in "qkv")
        inner = torch.cat(
            [self._a(0, i) @ (c * torch.einsum("id,jdr->ijr", q[i], d_k)) for i in rows]
        )
        return c_i @ d_q + inner + (p @ d_v.flatten(1)).view_as(y)
