"""What the maps of single tokens do to all queries, and to the covariances of rows, for our bounds on heads with variants.

Upper values: Lemma 79 (docs/theory/upper_values.md). Factors are divided by their sizes and multiplied in float32, or in float64 where
results are small beside them; rounding is allowed for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.lipbound2026.parts import root
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import block_norm, gamma, reproducible_float32

TINIEST = 1e-290
"""Sizes below are as good as zero."""
LOST = 2.0**-80
"""More than underflow can take from sums of products of numbers that are 1 at most, in float32."""


class Parts(NamedTuple):
    r"""Of some tokens t, first as keys, then as queries; i and k are any tokens.

    Attributes:
        length, image: :math:`|\tilde q_{it}|` and :math:`|W_V^T \tilde q_{it}|`, (n, N).
        inner: :math:`\sum_t E_{it} E_{kt} |\tilde q_{it} \cdot \tilde q_{kt}|`, (N, N), or None without weights E.
        b, b_v, b_q: :math:`\|B_t\|` and :math:`\|B_t W_V\|`, (n,), and :math:`|B_t \tilde q_{kt}|`, (n, N).
    """

    length: Tensor
    image: Tensor
    inner: Tensor | None
    b: Tensor
    b_v: Tensor
    b_q: Tensor


class Own(NamedTuple):
    r"""Of some tokens t as queries.

    Attributes:
        b, b_v: as in `Parts`. through, size: matrices (n, d_v, d) of Frobenius norm 1 and their sizes (n, 1), which times one another and times
            :math:`L_t q_k` are :math:`B_t \tilde q_{kt}`. off: what rounding may take from its length, over the sizes of :math:`D^k_t` and q_k, (n,).
    """

    b: Tensor
    b_v: Tensor
    through: Tensor
    size: Tensor
    off: Tensor


class Maps:
    """Of one head of one sample of a float64 layer.

    Where derivatives are wanted, or maps have a direction of their own for every token, products are in float64, and lengths come from the Gram
    matrices of projections; else from their small factors.

    Attributes:
        tangents: how its queries, keys and values follow their tokens.
        work: dtype of the products. width: how many numbers the largest temporary has for every pair of tokens.
    """

    def __init__(self, att: Attention, sample: int, h: int, keep: slice | Tensor):
        self.tangents = tangents = Tangents(att, sample, h)
        self._factored = not (att.cache.recording or tangents.directed)
        self.work = torch.float32 if self._factored and reproducible_float32() else torch.float64
        q = att.scale * att.q[sample, h][keep]
        self._n, self._d, self._d_v = len(q), q.shape[1] + 1, att.d_v
        self._inputs, self._norm_v = att.x.shape[2], torch.linalg.matrix_norm(att.w_v[h].detach())
        self._size = q.detach().norm(dim=-1)
        self._unit = q / self._size.clamp_min(TINIEST)[:, None]
        self.width = max(self._d, self._d_v)

    def parts(self, tokens: Tensor, weights: Tensor | None, cov: Tensor, size_c: Tensor) -> Parts:
        """All of some tokens.

        Args:
            tokens: their numbers, (n,). weights: E_it, (n, N), or None where ``inner`` is not wanted.
            cov: C_t, (n, d_v, d), size_c: what their rounding is relative to, (n,).
        """
        s_k, q = self.tangents.size("k", tokens).detach()[:, None], self._size
        u, size_u = _apart(self.tangents.turned("k", self._unit[None], tokens), -1, self.work)
        size_u, small = size_u[..., 0] * q, gamma(self._inputs + 6 * self._d + self._d_v + 46)
        f, size = normalised(self.tangents.projection("k", tokens), self.work) if self._factored else self._metric("k", "k", tokens, self.work)
        through, size_v = self._metric("k", "v", tokens, self.work)
        y, g = _times(u, f), gamma(self._d + 8, self.work)
        image = _lengths(_times(u, through), g) * size_v * size_u + small * self._norm_v * s_k * q
        if self._factored:
            right, relative = y, _lengths(y, g)
            length = relative * size * size_u + small * s_k * q
        else:
            right, size, relative = u, size.sqrt(), torch.ones_like(size_u)
            length = root((y * u).sum(-1).clamp_min(0) * (size * size_u) ** 2 + small * (s_k * q) ** 2)
        inner = None
        if weights is not None:
            tops = weights.detach() * s_k * q * (5 if self._factored else 1)  # squared, 25: the factor is larger by 16 roundings
            inner = self._inner(y, right, relative.detach(), weights * size * size_u, g) + small * tops.mT @ tops
        own, q = self._own(tokens, cov, size_c), self._size
        seen = _lengths(u @ own.through.to(self.work).mT, gamma(2 * self._d + 16, self.work)) * (own.size * size_u)
        return Parts(length, image, inner, own.b, own.b_v, seen + own.off[:, None] * s_k * q)

    def _inner(self, left: Tensor, right: Tensor, relative: Tensor, weights: Tensor, g: float) -> Tensor:
        """Sums of |left_i . right_k| over tokens, with ``weights`` of rows, whose lengths are at most ``relative``."""
        top = weights.detach().amax().clamp_min(TINIEST)
        weights = weights / top
        w = weights.to(self.work)[..., None]
        mine = w * left
        each = mine @ (mine if right is left else w * right).mT
        total = (each.abs() if each.requires_grad else each.abs_()).sum(0).double()
        own, long = weights.detach(), weights.detach() * relative
        cross = long.mT @ own
        off = gamma(self._d + 8, self.work) * long.mT @ long + g * (cross + cross.mT)
        return (total * (1 + gamma(len(weights) + 4, self.work)) + off + LOST) * top**2

    def _own(self, tokens: Tensor, cov: Tensor, size_c: Tensor) -> "Own":
        """What the tokens do as queries."""
        s_q = self.tangents.size("q", tokens).detach()
        wide = torch.float64  # float32 would cost these norms 1e-4: they are small beside their factors
        own, size_own = _apart(self.tangents.turned("q", cov, tokens), (-2, -1), wide)
        gram, size = self._metric("q", "q", tokens, wide)
        (values, size_v), (keys, size_k) = self._metric("q", "v", tokens, wide), self._metric("q", "k", tokens, wide)
        g, off = gamma(self._d + 8, wide), gamma(2 * self._n + self._inputs + 8 * self._d + self._d_v + 68) * size_c * s_q
        once = size_own[:, 0, 0]
        b = root(block_norm(_times(own, gram) @ own.mT) * size[:, 0] * once**2 + off * size_c * s_q)
        b_v = (block_norm(_times(own, values)) + g) * (size_v[:, 0] * once) + off * self._norm_v
        through, size = _apart(_times(own, keys), (-2, -1), wide)
        return Own(b, b_v, through, size[..., 0] * size_k * once[:, None], off)

    def _metric(self, a: str, b: str, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return normalised(self.tangents.metric(a, b, tokens), dtype)


def normalised(m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices, those of their absolute values made no longer than 1 in the 2-norm, and by what they were divided, (n or 1, 1)."""
    size = m.detach().abs()
    size = torch.minimum(torch.linalg.matrix_norm(size), (size.sum(-1).amax(-1) * size.sum(-2).amax(-1)).sqrt())[:, None]
    return (m / size.clamp_min(TINIEST)[..., None]).to(dtype), size


def _times(x: Tensor, m: Tensor) -> Tensor:
    """Products (n, N, a) @ (n or 1, a, b), those with one matrix as one product."""
    return x @ (m[0] if len(m) == 1 else m)


def _lengths(x: Tensor, off: float) -> Tensor:
    """Upper values of the lengths of rows, each of which is off by a vector of length ``off`` at most; float64."""
    return torch.linalg.vector_norm(x, dim=-1).double() * (1 + off) + off


def _apart(x: Tensor, dim: int | tuple[int, int], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """x with 2-norms (Frobenius norms) of 1 along some axes, and those that it had."""
    size = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True)
    return (x / size.clamp_min(TINIEST)).to(work), size
