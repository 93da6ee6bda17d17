r"""The norms of the parts of the blocks of J, which our bounds on plain heads are made of."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.matrix_norms import UNIT, block_norm, matrix_norm, nonnegative_norm

CHUNK = 2**22
"""Bytes of the largest temporary, the N x d_v x d moments of some heads of one sample."""
RTOL = 1e-5
"""How far above the exact norms of N x N matrices their upper values may stay."""


def in_chunks(att: Attention, values: Callable[[Attention, int, slice], Tensor]) -> Tensor:
    """``values`` (heads, r) of every head of every sample, as many heads at a time as memory allows, (samples, heads, r)."""
    att, unit = att.unit_values()
    heads = max(1, int(CHUNK // (8 * att.tokens * max(att.d_v * max(att.d, att.d_v), att.tokens))))
    rows = [torch.cat([values(att, s, slice(h, min(att.heads, h + heads))) for h in range(0, att.heads, heads)]) for s in range(att.samples)]
    return torch.stack(rows) * unit[:, None]


class BlockNorms:
    """What both bounds are made of, for some heads of one sample, in float64: norms of the parts of the blocks of J.

    Second moments of all rows come from one product each: Lemma 52 (docs/theory/numerics.md).

    Attributes:
        p, q, v, o: probabilities, queries, centred values, outputs. qt: :math:`\\tilde q_i` in coordinates of the columns of W_K.
        distance: :math:`|v_j - o_i|`, (heads, N, N). norm_v: :math:`\\|W_V\\|`, (heads, 1, 1).
        b: :math:`\\|B_i\\|`, (heads, N). With ``gram`` also b_v: :math:`\\|B_i W_V\\|`, a: :math:`\\|A_i\\|`, (heads, N), and
        b_q: :math:`|B_i \\tilde q_k|`, (heads, N, N).
    """

    def __init__(self, att: Attention, sample: int, heads: slice, *, gram: bool = False):
        p, q = att.p[sample, heads].double(), att.q[sample, heads].double()
        k, v = att.centred_k[sample, heads], att.centred_v[sample, heads]
        w_q, w_k, w_v = (w[heads].double() for w in (att.w_q, att.w_k, att.w_v))
        n, d, d_v = att.tokens, att.d, att.d_v
        self.p, self.q, self.v = p, q, v
        self.o = o = p @ v
        self.distance = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
        self.qt = att.scale * q @ triangular_factor(w_k).mT
        self.norm_v = matrix_norm(w_v)[:, None, None]
        self.z = (att.scale * q @ (w_k.mT @ w_v)).norm(dim=-1)  # |z_i|
        self.size = v.detach().norm(dim=-1).amax(-1)[:, None]  # scale of rounding in differences of values

        # Row by row, since the d_v x d matrices of all rows would not fit.
        keys, mean_k, factor = _outer(v, k), p @ k, triangular_factor(w_q).mT[:, None]
        if gram:
            images, projected = att.scale * q @ (w_q.mT @ w_k).mT, (w_q.mT @ w_v)[:, None]
            pairs, lengths = _pairs(images), images.norm(dim=-1)
            w2, squares = p * p, _outer(v, v)
            total = w2.sum(-1)
            side = w2 @ v - total[..., None] / 2 * o
        step = max(1, int(CHUNK // (8 * len(p) * d_v * max(d, d_v))))
        found: list[tuple[Tensor, ...]] = []
        for i in range(0, n, step):
            r = slice(i, i + step)
            c = att.scale * ((p[:, r] @ keys).unflatten(-1, (d_v, d)) - o[:, r, :, None] * mean_k[:, r, None, :])  # c C_i
            norms: tuple[Tensor, ...] = (block_norm(c @ factor),)
            if gram:
                cross = side[:, r, :, None] * o[:, r, None, :]
                squared = (w2[:, r] @ squares).unflatten(-1, (d_v, d_v)) - cross - cross.mT  # A_i A_i^T
                a = root(block_norm(squared) + (1e-13 + 2 * n * UNIT) * total[:, r] * self.size**2)
                norms += (block_norm(c @ projected), a, _image_norms(c, pairs, lengths))
            found.append(norms)
        whole = [torch.cat(part, 1) for part in zip(*found, strict=True)]
        self.b = whole[0]
        if gram:
            self.b_v, self.a, self.b_q = whole[1:]

    def block(self) -> Tensor:
        """The compression of J itself, (heads,)."""
        sizes = self.p * (self.norm_v + self.distance * self.qt.norm(dim=-1, keepdim=True)) + torch.diag_embed(self.b)
        return nonnegative_norm(sizes, rtol=RTOL) * (1 + 1e-11)

    # The terms of the compression of J J^T, (heads, N, N) each: with ``gram``.

    def values(self) -> Tensor:
        """S ||W_V||^2."""
        return self.p @ self.p.mT * self.norm_v**2

    def queries(self) -> Tensor:
        """diag ||B_i||^2."""
        return torch.diag_embed(self.b**2)

    def mixed(self) -> Tensor:
        """X + X^T."""
        p = self.p
        reach = torch.minimum(p * self.distance @ p.mT, self.a[..., :, None] * p.norm(dim=-1)[..., None, :])
        x = p * self.b_v[..., None, :] + p.mT * self.b_q * self.distance.mT + self.z[..., :, None] * reach
        return x + x.mT

    def keys(self) -> Tensor:
        """K."""
        e = self.p * self.distance
        return (self.qt @ self.qt.mT).abs() * torch.minimum(self.a[..., :, None] * self.a[..., None, :], e @ e.mT)


def triangular_factor(w: Tensor) -> Tensor:
    """F with F^T F = w^T w: the triangular factor, small; w itself where gradients are wanted, which QR has not at every w."""
    if w.requires_grad or w.shape[-2] <= w.shape[-1]:
        return w
    return torch.linalg.qr(w, mode="r").R


def root(x: Tensor) -> Tensor:
    """Square root whose derivative at 0 is 0."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)


def _pairs(y: Tensor) -> Tensor:
    """Products y_i y_j of coordinates of y (heads, N, d), doubled where i < j: (heads, N, d (d + 1) / 2). Quadratic forms become inner products."""
    i, j = torch.triu_indices(y.shape[-1], y.shape[-1], device=y.device)
    return y[..., i] * y[..., j] * torch.where(i == j, 1.0, 2.0)


def _image_norms(maps: Tensor, pairs: Tensor, lengths: Tensor) -> Tensor:
    r"""|M_i y_k|, rounded upwards, for maps (heads, n, d_v, d), `_pairs` of y_k and their lengths (heads, N): (heads, n, N).

    As :math:`(y^T M^T M y)^{1/2}`, one product of matrices for all of them; to its square the rounding error is added: Lemma 53
    (docs/theory/numerics.md).
    """
    d_v, d = maps.shape[-2:]
    i, j = torch.triu_indices(d, d, device=maps.device)
    forms = (maps.mT @ maps)[..., i, j]
    size = (maps.detach() ** 2).sum((-1, -2))
    allowance = 2 * (d * d + d_v) * UNIT * size[..., :, None] * lengths.detach()[..., None, :] ** 2
    return root((forms @ pairs.mT).clamp_min(0) + allowance)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    """Rows of outer products, (heads, N, a) and (heads, N, b) -> (heads, N, a b)."""
    return (x[..., :, None] * y[..., None, :]).flatten(-2)
