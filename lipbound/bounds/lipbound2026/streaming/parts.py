r"""Norms of the parts of the blocks of J that have one number, or one small matrix, for every token: what is kept while rows of P come and go.

Upper values but for `positive_slack`, as those of `lipbound.bounds.lipbound2026.parts.BlockNorms`: Lemma 78 (docs/theory/upper_values.md).
"""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors
from lipbound.bounds.lipbound2026.parts import weights_of
from lipbound.bounds.lipbound2026.pieces import lengths, outer, root
from lipbound.bounds.lipbound2026.streaming.rows import ROW_BYTES, Rows
from lipbound.jacobians.rounding import Moments
from lipbound.linalg.matrix_norms import block_norm, gamma

LARGEST = 8
"""How many entries of a row count one by one."""
FORM_BYTES = 2**30
"""Bytes of the quadratic forms |B_i y|^2 of all rows above which norms |B_i q~_k| are replaced by products of norms."""


class TokenNorms:
    r"""Of one head of a float64 layer with one sample.

    Attributes:
        rows: of P. v, o: centred values and outputs, (N, d_v). norm_v: :math:`\|W_V\|`.
        qt, off_qt, qt_norm, size: as in `BlockNorms`, (N, ...).
        b: :math:`\|B_i\|`, (N,). What follows is there with ``gram`` alone.
        z: :math:`|z_i|`. b_v: :math:`\|B_i W_V\|`. a: :math:`\|A_i\|`. rest: the same without the largest entries of a row. All (N,).
        keys: where the largest :math:`E_{ij}` of every row stand, (N, `LARGEST`). parts: these numbers.
        shares, p_norm, p_rest: the same of P, and :math:`|P_i|`.
        columns: sums of columns of E, (N,).
        moments: of the rows of P. largest: its largest entry.
    """

    def __init__(self, att: Attention, head: int, errors: TensorErrors, *, gram: bool):
        self._att, self._gram, self._q = att, gram, att.scale * att.q[0, head]
        self.k, self.v = att.centred_k[0, head], att.centred_v[0, head]
        n, d, d_v = att.tokens, att.d, att.d_v
        self.rows = Rows(att, head, d_v * max(d, d_v))
        weights = weights_of(att)
        self._factor_q, factor_k, self.excess, self.norm_v, size_q, size_k, size_v = (w[head] for w in weights)
        self._sizes = size_q, size_k, size_v
        self.size = lengths(self._q)
        self.qt = self._q @ factor_k.mT
        self.off_qt = gamma(d + 2) * self.size * size_k
        self.qt_norm = self.qt.norm(dim=-1) + self.off_qt
        self.o, self.b = torch.zeros_like(self.v), torch.zeros_like(self.size)
        if gram:
            self._prepare(head)
        self._stats = torch.zeros(4, n, dtype=torch.float64, device=att.device)
        for rows, p in self.rows:
            self._measure(rows, p, errors, head)
        value, key, top, total = self._stats
        self.moments, self.largest = Moments.of(value, key, 1.0, top, total), top.amax()

    def _prepare(self, head: int) -> None:
        att, (size_q, size_k, size_v) = self._att, self._sizes
        n, d, inputs = att.tokens, att.d, att.x.shape[2]
        w_q, w_k, w_v = (w[head] for w in (att.w_q, att.w_k, att.w_v))
        self.z = (self._q @ (w_k.mT @ w_v)).norm(dim=-1) + gamma(inputs + d + 4) * self.size * (size_k * size_v)
        self.images, self._projected = self._q @ (w_q.mT @ w_k).mT, w_q.mT @ w_v
        self.reach = self.size * (size_q * size_k)  # at least |W_Q^T q~_k|
        count = min(LARGEST, n)
        self.b_v, self.a, self.rest, self.p_norm, self.p_rest, self.columns, self.lost = (torch.zeros_like(self.size) for _ in range(7))
        self.keys, self.p_keys = (torch.zeros(n, count, dtype=torch.long, device=att.device) for _ in range(2))
        self.parts, self.shares = (self.size.new_zeros(n, count) for _ in range(2))
        self.forms: Tensor | None = None
        if 8 * n * d * (d + 1) // 2 <= FORM_BYTES:
            self._at = torch.triu_indices(d, d, device=att.device)
            self.forms, self.allowance = self.size.new_zeros(n, d * (d + 1) // 2), torch.zeros_like(self.size)

    def distance(self, rows: slice) -> Tensor:
        """|v_j - o_i| of some rows i, (rows, N)."""
        return torch.cdist(self.o[rows], self.v, compute_mode="donot_use_mm_for_euclid_dist")

    def _measure(self, rows: slice, p: Tensor, errors: TensorErrors, head: int) -> None:
        att, (size_q, _, size_v) = self._att, self._sizes
        n, d, inputs = att.tokens, att.d, att.x.shape[2]
        self.o[rows] = o = p @ self.v
        value, key, top, total = self._stats
        value[rows], key[rows], top[rows] = p @ errors.v[0, head] ** 2, p @ errors.k[0, head] ** 2, p.amax(-1)
        total += p.sum(0)

        length_k, length_v = lengths(self.k), lengths(self.v)
        c = att.scale * (against_outer(p, self.v, self.k) - o[:, :, None] * (p @ self.k)[:, None])
        size_c = c.flatten(1).norm(dim=-1)
        off = gamma(n + 6) * abs(att.scale) * (p @ (length_v * length_k) + lengths(o) * (p @ length_k))
        self.b[rows] = block_norm(c @ self._factor_q.mT) + (off + gamma(d + 2) * size_c) * size_q
        if not self._gram:
            return
        self.b_v[rows] = block_norm(c @ self._projected) + (off + gamma(inputs + d + 4) * size_c) * (size_q * size_v)
        self.lost[rows] = off + gamma(inputs + 2 * d + 6) * size_c
        if self.forms is not None:
            self.forms[rows] = (c.mT @ c)[:, self._at[0], self._at[1]]
            self.allowance[rows] = gamma(d * (d + 1) // 2 + att.d_v + 8) * size_c**2
        self._split(rows, p, o)

    def _split(self, rows: slice, p: Tensor, o: Tensor) -> None:
        """The largest entries of some rows, and the norms of A_i with and without them."""
        n, count = self._att.tokens, self.keys.shape[1]
        e = p * self.distance(rows)
        self.columns += e.sum(0)
        self.parts[rows], self.keys[rows] = parts, keys = e.topk(count, -1)
        self.shares[rows], self.p_keys[rows] = p.topk(count, -1)
        self.p_norm[rows], self.p_rest[rows] = p.norm(dim=-1), p.scatter(1, self.p_keys[rows], 0.0).norm(dim=-1)

        own = (self.v[keys] - o[:, None]) * p.gather(1, keys)[..., None]
        w2 = (p * p).scatter_(1, keys, 0.0)
        total = w2.sum(-1)
        side = w2 @ self.v - total[:, None] / 2 * o
        squared = against_outer(w2, self.v, self.v) - outer(side, o).view(len(o), *o.shape[1:] * 2) - outer(o, side).view(len(o), *o.shape[1:] * 2)
        length, length_o = lengths(self.v), lengths(o)
        off = gamma(n + 10) * (w2 @ length**2 + 2 * length_o * (w2 @ length) + total * length_o**2)
        self.rest[rows] = torch.minimum(root(block_norm(squared) + off), e.scatter(1, keys, 0.0).norm(dim=-1))
        off = off + gamma(n + 10) * parts.square().sum(-1)
        self.a[rows] = torch.minimum(root(block_norm(squared + own.mT @ own) + off), e.norm(dim=-1))

    def through_queries(self, rows: slice) -> Tensor:
        r""":math:`|B_i \tilde q_k|` of all i for some k, (rows, N)."""
        if self.forms is None:
            return self.qt_norm[rows, None] * self.b
        y = self.images[rows]
        i, j = self._at
        pairs = y[:, i] * y[:, j] * torch.where(i == j, 1.0, 2.0)
        squares = (pairs @ self.forms.mT).clamp_min_(0).addcmul_(lengths(y)[:, None] ** 2, self.allowance)
        return squares.sqrt_().addcmul_(self.reach[rows, None], self.lost)

    def inner(self, rows: slice, cols: slice = slice(None)) -> Tensor:
        r""":math:`|\tilde q_i \cdot \tilde q_k|` of some i and k, (rows, cols)."""
        length, off = lengths(self.qt) + self.off_qt, self.off_qt
        left = torch.stack([gamma(self.qt.shape[-1] + 2) * length + 2 * off, length, self.excess * self.size], -1)
        right = torch.stack([length, 2 * off, self.size], -1)
        return (self.qt[rows] @ self.qt[cols].mT).abs_().addmm_(left[rows], right[cols].mT)


def against_outer(p: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Sums over tokens of p_ij x_j y_j^T for rows p (n, N), without the outer products of all tokens at once: (n, a, b)."""
    n, (a, b) = len(x), (x.shape[1], y.shape[1])
    total, step = p.new_zeros(len(p), a * b), max(1, ROW_BYTES // (8 * a * b))
    for j in range(0, n, step):
        part = slice(j, j + step)
        total.addmm_(p[:, part], outer(x[part], y[part]))
    return total.unflatten(-1, (a, b))
