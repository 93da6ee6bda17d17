r"""The matrix :math:`G = J J^T` of one head with rotary embeddings, normalised queries and keys, a
cap or sinks, block by block and in closed form.

Statement and proof: Lemma 8 (docs/theory/jacobian.md). :math:`D^a_j` maps a perturbation of token j
to that of its query, key or value (`lipbound.jacobians.token_tangents`), and
:math:`M^{ab}_j = D^a_j D^{bT}_j`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.errors import AttentionError
from lipbound.jacobians.gram import TILE, Gram
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import gamma


def covered(att: Attention, heads: list[int], w_o: Tensor | None = None) -> None:
    """Raise AttentionError where J J^T of these heads together has no closed form here: several
    heads, or projected ones, with variants."""
    if att.variants and (len(heads) > 1 or w_o is not None):
        has = " and ".join(VARIANTS[name] for name in VARIANTS if name in att.variants)
        raise AttentionError(
            f"J J^T of a layer with {has} has a closed form one head at a time only; use "
            "map='head' or 'head_out', or method 'lanczos' with delta"
        )


def gram_of(att: Attention, sample: int, heads: list[int], w_o: Tensor | None = None) -> Gram:
    """J J^T of some heads of one sample, whatever the layer is: arguments as of `Gram`; heads with
    variants one at a time, and without ``w_o``.

    Raises:
        AttentionError: see `covered`.
    """
    covered(att, heads, w_o)
    return VariantGram(att, sample, heads[0]) if att.variants else Gram(att, sample, heads, w_o)


class VariantGram(Gram):
    """J J^T of one head of one sample, any variant (none included); padding tokens are left out.

    Operations O(N^3 (d_v^2 + d) + N^3 d^2 / n) for tiles of n tokens, memory O(N (d + d_v)^2 + N^2)
    and a few tiles.

    Args:
        att: the layer; its P, weights, q, k, v and the derivative of what stands between
            projections and scores are cast to float64 as they are.
        sample: which input. head: which head.
    """

    covers = VARIANTS

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
        """Slices of the tokens that are not padding, and where these stand among all: so many that
        a matrix for each of them fits a tile."""
        step = max(
            1, int(TILE.get(self.device.type, TILE["cpu"]) // (8 * (self._q.shape[2] + 1) ** 2))
        )
        if step >= self.tokens:
            yield slice(0, self.tokens), self._kept
            return
        for i in range(0, self.tokens, step):
            yield slice(i, i + step), self._kept[i : i + step]

    def _rounding(self, lengths: Tensor, k: Tensor, inputs: int) -> float:
        r"""Bound on the 2-norm of the rounding error of G, in tiles or products, given P, its
        weights, v - o, q, k and the maps of the tokens.

        Lemma 55 (docs/theory/numerics.md), which counts the roundings that a product sees, in
        `tile` or in `apply`; :math:`s^a_j` is `Tangents.size`.
        """
        s_q, s_k = (
            torch.cat([self._tangents.size(a, at).expand(len(at)) for _, at in self._parts()])
            for a in "qk"
        )
        part = float(self._p.norm()) * float(self._w["v"].norm())
        part += abs(self._scale) * float(
            (lengths[0] * self._q[0].norm(dim=1)[:, None] * s_k).norm()
        )
        part += abs(self._scale) * float((lengths[0] @ k[0].norm(dim=1) * s_q).amax())
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
        """Slices of the tokens that are summed over, so many that what is formed for each of them
        fits a tile."""
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
        """G y for r vectors at a time, (N, d_v, r) -> (N, d_v, r), as J (J^T y) in the arrays that
        the tiles are made of."""
        step, c, r = self._step(), self._scale, y.shape[-1]
        rows = [slice(i, min(i + step, self.tokens)) for i in range(0, self.tokens, step)]
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
