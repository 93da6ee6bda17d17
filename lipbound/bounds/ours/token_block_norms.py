"""What the maps of single tokens do to all queries, and to the covariances of rows, for our bounds
on heads with variants.

Upper values: Lemma 79 (docs/theory/upper_values.md). Factors are divided by their sizes and
multiplied in float32, or in float64 where results are small beside them; rounding is allowed for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ours.rounded_products import (
    SQUARINGS,
    TINIEST,
    divided,
    normalised,
    outer,
    root,
    upper_lengths,
)
from lipbound.devices import Room
from lipbound.jacobians.token_tangents import Tangents
from lipbound.linalg.matrix_norms import block_norm, gamma, reproducible_float32

PAIR_BYTES = 2**28
"""Bytes up to which the products of all values with all keys are kept."""
LOST = 2.0**-80
"""More than underflow can take from sums of products of numbers that are 1 at most, in float32."""


class TokenVectors(NamedTuple):
    r"""Of some tokens t, first as keys, then as queries; i and k are any tokens.

    Attributes:
        length, image: :math:`|\tilde q_{it}|` and :math:`|W_V^T \tilde q_{it}|`, (n, N).
        inner: :math:`\sum_t E_{it} E_{kt} |\tilde q_{it} \cdot \tilde q_{kt}|`, (N, N), or None
            without weights E.
        b, b_v, b_q: :math:`\|B_t\|` and :math:`\|B_t W_V\|`, (n,), and :math:`|B_t \tilde q_{kt}|`,
            (n, N).
    """

    length: Tensor
    image: Tensor
    inner: Tensor | None
    b: Tensor
    b_v: Tensor
    b_q: Tensor


class QueryVectors(NamedTuple):
    r"""Of some tokens t as queries.

    Attributes:
        b, b_v: as in `TokenVectors`. through, size: matrices (n, d_v, d) and sizes (n, 1), which
            times one another and times :math:`L_t q_k` are :math:`B_t \tilde q_{kt}`.
        rounded: how far ``through`` may be from what it stands for in the Frobenius norm, (n, 1).
        off: what float64 rounding may take from its length, over the sizes of :math:`D^k_t` and
            q_k, (n,).
    """

    b: Tensor
    b_v: Tensor
    through: Tensor
    size: Tensor
    rounded: Tensor
    off: Tensor


class MappedVectors(NamedTuple):
    """Vectors of length 1 at most, or matrices of Frobenius norm 1, mapped by some tokens: y times
    size; ``spread`` (n or 1, 1) is at least the 2-norm of the absolute values of the maps, over the
    sizes, which the rounding of y is relative to."""

    y: Tensor
    size: Tensor
    spread: Tensor


class Covariances:
    """The covariances C_i of values and keys, c times, of many rows at a time: where memory allows,
    from the products of all values with all keys, which are put into ``room``."""

    def __init__(self, c: float, v: Tensor, k: Tensor, room: Room | None = None):
        self._v, self._k = v, c * k
        self._pairs = (
            outer(v, self._k, room) if 8 * len(v) * v.shape[1] * k.shape[1] <= PAIR_BYTES else None
        )

    def of(self, t: Tensor, o: Tensor, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(rows, d_v, d), and sums of the sizes of their terms, (rows,), from rows of weights of
        some keys, and outputs."""
        v, k = self._v[keys], self._k[keys]
        sums = (
            (t[:, None] * v.mT) @ k
            if self._pairs is None
            else (t @ self._pairs[keys]).unflatten(-1, (v.shape[1], -1))
        )
        far, long, weights = v.detach().norm(dim=-1), k.detach().norm(dim=-1), t.detach()
        sizes = weights @ (far * long) + o.detach().norm(dim=-1) * (weights @ long)
        return torch.addcmul(sums, o[:, :, None], (t @ k)[:, None, :], value=-1), sizes


class Maps:
    """Of one head of one sample of a float64 layer.

    Where derivatives are wanted, or maps have a direction of their own for every token, products
    are in float64, and lengths come from the Gram matrices of projections; else from their small
    factors.

    Attributes:
        tangents: how its queries, keys and values follow their tokens.
        work: dtype of the products. width: how many numbers the largest temporary has for every
            pair of tokens.
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
        self._normal: dict[tuple[str, torch.dtype], tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def parts(
        self, tokens: Tensor, weights: Tensor | None, own: QueryVectors, rows: slice = slice(None)
    ) -> TokenVectors:
        """All of some tokens, at the queries ``rows``, which are the N of `TokenVectors`.

        Args:
            tokens: their numbers, (n,). weights: E_it, (n, N), or None where ``inner`` is not
                wanted. own: of these tokens.
        """
        s_k, q = self.tangents.size("k", tokens).detach()[:, None], self._size[rows]
        moved = self._moved("k", self._unit[None, rows], tokens, -1, self.work)
        u, size_u, reach = moved.y, moved.size * q, s_k * q
        small, g = gamma(self._inputs + 6 * self._d + self._d_v + 46), gamma(self._d + 8, self.work)
        f, size = (
            self._factor("k", tokens, self.work)
            if self._factored
            else self._metric("k", "k", tokens, self.work)
        )
        through, size_v = self._metric("k", "v", tokens, self.work)
        y = _times(u, f)
        image = (
            _lengths(_times(u, through), g, moved.spread) * (size_v * size_u)
            + (small * self._norm_v) * reach
        )
        if self._factored:
            right, relative = y, _lengths(y, g, moved.spread)
            length = relative * (size * size_u) + small * reach
        else:
            right, size, relative = u, size.sqrt(), torch.ones_like(moved.size)
            length = root((y * u).sum(-1).clamp_min(0) * (size * size_u) ** 2 + small * reach**2)
        inner = None
        if weights is not None:
            tops = (
                weights.detach() * reach * (5 if self._factored else 1)
            )  # squared, 25: the factor is larger by 16 roundings
            inner = (
                self._inner(
                    y, right, relative.detach(), weights * (size * size_u), g * moved.spread
                )
                + small * tops.mT @ tops
            )
        off = (
            gamma(self._d + 8, self.work) * own.through.detach().norm(dim=(-2, -1))[:, None]
            + own.rounded
        ) * moved.spread
        seen = (_lengths(u @ own.through.mT, g, 0.0) + off) * (own.size * size_u)
        return TokenVectors(length, image, inner, own.b, own.b_v, seen + own.off[:, None] * reach)

    def _moved(
        self, a: str, x: Tensor, tokens: Tensor, dim: int | tuple[int, int], work: torch.dtype
    ) -> MappedVectors:
        """L x for the maps L of some tokens, x (n or 1, r, d_a) of norm 1 at most along the axes
        ``dim``, in the dtype ``work``."""
        if self._turns(a):
            spread = self.tangents.longest(a, tokens)
            one = torch.ones_like(spread)
            return MappedVectors(
                self.tangents.turned(a, x.to(work), tokens), one[:, None], spread[:, None]
            )
        y, size = _apart(self.tangents.turned(a, x, tokens), dim, work)
        return MappedVectors(y, size.flatten(1), size.new_ones(1, 1))

    def _turns(self, a: str) -> bool:
        """Whether vectors are turned in the dtype of the products."""
        return self._factored and self.tangents.turns_only(a)

    def _inner(
        self, left: Tensor, right: Tensor, relative: Tensor, weights: Tensor, g: Tensor
    ) -> Tensor:
        """Sums of |left_i . right_k| over tokens, with ``weights`` of rows, whose lengths are at
        most ``relative``; each is off by a vector of length ``g`` (n or 1, 1) at most."""
        top = weights.detach().amax().clamp_min(TINIEST)
        weights = weights / top
        w = weights.to(self.work)[..., None]
        mine = w * left
        each = mine @ (mine if right is left else w * right).mT
        total = (each.abs() if each.requires_grad else each.abs_()).sum(0).double()
        own, long = weights.detach(), weights.detach() * relative
        cross = long.mT @ (g * own)
        off = gamma(self._d + 8, self.work) * long.mT @ long + cross + cross.mT
        return (total * (1 + gamma(len(weights) + 4, self.work)) + off + LOST) * top**2

    def own(
        self, tokens: Tensor, cov: Tensor, size_c: Tensor, work: torch.dtype | None = None
    ) -> QueryVectors:
        """What some tokens (n,) do as queries, with products in ``work``; float64 where derivatives
        are wanted.

        Args:
            cov: C_t, (n, d_v, d), size_c: what their rounding is relative to, (n,).
        """
        work = self.work if work is None else work
        s_q = self.tangents.size("q", tokens).detach()
        once = torch.linalg.vector_norm(cov.detach(), dim=(-2, -1))
        unit = divided(
            cov, once.clamp_min(TINIEST)[:, None, None], work if self._turns("q") else torch.float64
        )
        moved = self._moved("q", unit, tokens, (-2, -1), work)
        own, once, g = (
            moved.y,
            once * moved.size[:, 0],
            gamma(self._d + 8, work) * moved.spread[:, 0],
        )
        off = gamma(2 * self._n + self._inputs + 8 * self._d + self._d_v + 68) * size_c * s_q
        (values, size_v), (keys, size_k) = (
            self._metric("q", "v", tokens, work),
            self._metric("q", "k", tokens, work),
        )
        if self._factored:
            f, size = self._factor("q", tokens, work)
            b = (block_norm(_times(own, f), squarings=SQUARINGS) + g) * (size[:, 0] * once) + off
        else:
            gram, size = self._metric("q", "q", tokens, work)
            b = root(
                block_norm(_times(own, gram) @ own.mT, squarings=SQUARINGS) * size[:, 0] * once**2
                + off * size_c * s_q
            )
        b_v = (block_norm(_times(own, values), squarings=SQUARINGS) + g) * (
            size_v[:, 0] * once
        ) + off * self._norm_v
        return QueryVectors(
            b, b_v, _times(own, keys), size_k * once[:, None], g[:, None].expand(len(b), 1), off
        )

    def _factor(self, a: str, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._normalised(a, self.tangents.projection(a, tokens), dtype)

    def _metric(self, a: str, b: str, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._normalised(a + b, self.tangents.metric(a, b, tokens), dtype)

    def _normalised(self, name: str, m: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`normalised` of matrices, once where they are the same for all tokens."""
        key = name, dtype
        if key not in self._normal or self._normal[key][0] is not m:
            self._normal[key] = m, normalised(m, dtype)
        return self._normal[key][1]


def _times(x: Tensor, m: Tensor) -> Tensor:
    """Products (n, N, a) @ (n or 1, a, b), those with one matrix as one product."""
    return x @ (m[0] if len(m) == 1 else m)


def _lengths(x: Tensor, off: float, size: Tensor | float) -> Tensor:
    """Upper values of the lengths of rows, each of which is off by a vector of length
    ``off * size`` at most; float64."""
    return upper_lengths(x) + off * size


def _apart(x: Tensor, dim: int | tuple[int, int], work: torch.dtype) -> tuple[Tensor, Tensor]:
    """x with 2-norms (Frobenius norms) of 1 along some axes, and those that it had."""
    size = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True)
    return divided(x, size.clamp_min(TINIEST), work), size
