r"""The matrix :math:`G = J J^T` of one head with rotary embeddings, normalised queries and keys, a cap or sinks, block by block and in closed form.

Notation of `lipbound.bounds.lipbound2026.variants`: :math:`D^a_j` is the map from token j to its query, key or value
(`lipbound.jacobians.token_tangents`; :math:`D^v_j = W_V^T`), :math:`M^{ab}_j = D^a_j D^{bT}_j`, :math:`A_{ij} = P_{ij} g_{ij} (v_j - o_i)` with
slopes g of the cap, :math:`C_i = c \sum_j A_{ij} k_j^T` and c = ``scale``. With :math:`z_{ij} = c\,M^{vk}_j q_i`,

.. math::
    G_{ik} &= (P_i \cdot P_k)\,W_V^T W_V + c^2 \sum_j (q_i^T M^{kk}_j q_k)\,A_{ij} A_{kj}^T + \delta_{ik}\,C_i M^{qq}_i C_i^T + X_{ik} + X_{ki}^T \\
    X_{ik} &= \sum_j A_{ij} z_{ij}^T P_{kj} + P_{ki}\,C_i M^{qv}_i + c\,(C_i M^{qk}_i q_k)\,A_{ki}^T

*Proof.* The block of J from token j to output i is :math:`J_{ij} = P_{ij} D^v_j + A_{ij} \tilde q_{ij}^T + \delta_{ij} C_i D^q_i` with
:math:`\tilde q_{ij} = c\,D_j^{kT} q_i`, and :math:`G_{ik} = \sum_j J_{ij} J_{kj}^T` has nine sums of products. Values with values give the first,
keys with keys the second, as :math:`\tilde q_{ij} \cdot \tilde q_{kj} = c^2 q_i^T M^{kk}_j q_k`. Queries meet queries where i = j = k. The
others: keys of i with values of k, :math:`A_{ij} \tilde q_{ij}^T D_j^{vT} P_{kj}`, where :math:`D^v_j \tilde q_{ij} = z_{ij}`; queries of i, where
j = i, with values of k, :math:`C_i D^q_i D_i^{vT} P_{ki}`, and with keys of k, :math:`C_i D^q_i \tilde q_{ki} A_{ki}^T`: together :math:`X_{ik}`.
Exchanging i and k transposes: the remaining three are :math:`X_{ki}^T`. QED
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
    """Raise AttentionError where J J^T of these heads together has no closed form here: several heads, or projected ones, with variants."""
    if att.variants and (len(heads) > 1 or w_o is not None):
        has = " and ".join(VARIANTS[name] for name in VARIANTS if name in att.variants)
        raise AttentionError(
            f"J J^T of a layer with {has} has a closed form one head at a time only; use map='head' or 'head_out', or method 'lanczos' with delta"
        )


def gram_of(att: Attention, sample: int, heads: list[int], w_o: Tensor | None = None) -> Gram:
    """J J^T of some heads of one sample, whatever the layer is: arguments as of `Gram`; heads with variants one at a time, and without ``w_o``.

    Raises:
        AttentionError: see `covered`.
    """
    covered(att, heads, w_o)
    return VariantGram(att, sample, heads[0]) if att.variants else Gram(att, sample, heads, w_o)


class VariantGram(Gram):
    """J J^T of one head of one sample, any variant (none included); padding tokens are left out.

    Operations O(N^3 (d_v^2 + d) + N^3 d^2 / n) for tiles of n tokens, memory O(N (d + d_v)^2 + N^2) and a few tiles.

    Args:
        att: the layer; its P, weights, q, k, v and the derivative of what stands between projections and scores are cast to float64 as they are.
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
        self._m_kk, self._m_kv = (torch.cat([d.product("k", b, at).expand(len(at), -1, -1) for _, at in parts]) for b in "kv")
        self._c_k, self._c_v = (torch.cat([c[i] @ d.product("q", b, at) for i, at in parts]) for b in "kv")
        self._own = torch.cat([c[i] @ d.product("q", "q", at) @ c[i].mT for i, at in parts])

    def _parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the tokens that are not padding, and where these stand among all: so many that a matrix for each of them fits a tile."""
        step = max(1, int(TILE.get(self.device.type, TILE["cpu"]) // (8 * (self._q.shape[2] + 1) ** 2)))
        for i in range(0, self.tokens, step):
            yield slice(i, i + step), self._kept[i : i + step]

    def _rounding(self, lengths: Tensor, k: Tensor, inputs: int) -> float:
        r"""Bound on the 2-norm of the rounding error of G, in tiles or products, given P, its weights, v - o, q, k and the maps of the tokens.

        Every entry of G is a sum of products of entries of these arrays. Whichever way it is evaluated, by `tile` or by `apply`, a product sees at
        most k = 2 N + D + 6 d + d_v + 40 roundings: at most N for each sum over tokens, of which two are nested where :math:`C_i` takes part
        twice; D for the products of projections; d + 1 on each side of them for the maps after the projections; d for each product with q,
        k or C; d_v for one with a vector; and one for each other factor or sum of terms. So the error is at most :math:`\gamma_k |J| |J|^T` entry
        by entry, where :math:`|J|` is J with the absolute values of the arrays: the sum of its three parts, whose 2-norms are at most
        :math:`\|P\|_F \|W_V\|_F`, the Frobenius norm of :math:`[c\,|A_{ij}| |q_i| s^k_j]_{ij}`, and :math:`\max_i c \sum_j |A_{ij}| |k_j| s^q_i`,
        with :math:`s_j` from `Tangents.size`.
        """
        s_q, s_k = (torch.cat([self._tangents.size(a, at).expand(len(at)) for _, at in self._parts()]) for a in "qk")
        part = float(self._p.norm()) * float(self._w["v"].norm())
        part += abs(self._scale) * float((lengths[0] * self._q[0].norm(dim=1)[:, None] * s_k).norm())
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
        """Slices of the tokens that are summed over, so many that what is formed for each of them fits a tile."""
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
            inner = self._scale**2 * (q_r @ self._m_kk[j] @ q_c.mT)  # (j, i, k)
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
        """G y for r vectors at a time, (N, d_v, r) -> (N, d_v, r), as J (J^T y) in the arrays that the tiles are made of."""
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
        inner = torch.cat([self._a(0, i) @ (c * torch.einsum("id,jdr->ijr", q[i], d_k)) for i in rows])
        return c_i @ d_q + inner + (p @ d_v.flatten(1)).view_as(y)
