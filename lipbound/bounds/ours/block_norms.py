r"""The norms of the parts of the blocks of J, which our bounds on plain heads are made of.

They are upper values in real arithmetic: what rounding may have taken from a difference is added to
it, and what it takes from sums and products of numbers >= 0 is put back by one factor at the end:
Lemmas 77, 78 and 79 (docs/theory/upper_values.md).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import keep_result, memoised
from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import ordinary, unit_scales
from lipbound.attention.rounding import TensorErrors, tensor_errors
from lipbound.bounds.ours.rounded_products import lengths, mean
from lipbound.bounds.ours.row_moments import (
    CovarianceFactors,
    RowTensors,
    all_norms,
    own_norms,
    query_norms,
)
from lipbound.devices import require
from lipbound.jacobians.rounding import Moments, distance
from lipbound.linalg.matrix_norms import (
    gamma,
    matrix_norm,
    nonnegative_norm,
    times_power_up,
    upper_factor,
)

CHUNK = 2**22
"""Bytes of the largest temporary, the N x d_v x d moments of some heads of one sample."""
MATRICES = 17
"""How many N x N matrices of one head are in memory together, besides P of all heads."""
STORED = 4e9
"""Bytes of matrices over all pairs of tokens up to which our bounds are computed; longer heads have
their exact norm enclosed in less time."""
TINY = 2.0**-160
"""At least what underflow can take from a norm, relative to the largest probability and the sizes
of values and their weights."""
RTOL = 1e-5
"""How far above the exact norms of N x N matrices their upper values may stay."""


def longest(heads: int) -> int:
    """Most tokens at which our bounds are computed on layers of so many heads: 5,271 for one head,
    4,153 for twelve."""
    return int((STORED / (8 * (MATRICES + heads))) ** 0.5)


def in_chunks(
    att: Attention,
    values: Callable[[Attention, int, slice], Tensor],
    reach: Sequence[float] = (1.0,),
) -> Tensor:
    """``values`` (heads, r) of every head of every sample, as many heads at a time as memory
    allows, (samples, heads, r): bounds that are sound as they stand.

    ``values`` are of one sample of a float64 layer of ordinary size
    (`lipbound.attention.rescaling.unit_scales`), and upper values but for
    `positive_slack`. ``reach`` says of each of the r, or of all, how much larger the norm that it
    bounds can be than the spectral norm of the same matrix. To them comes what rounding has left in
    the layer's P, q, k and v, and what underflow may hide. What cannot be evaluated is infinite.
    Proof: Lemma 80 (docs/theory/upper_values.md). Raises LipboundError where memory for them is not
    free.
    """
    most = (MATRICES + att.heads) * 8.0 * att.tokens**2
    kind = f" of heads with {', '.join(sorted(att.variants))}" if att.variants else ""
    what = f"our bounds{kind} at {att.tokens} tokens need matrices over all their pairs"
    require(most, att.device, what, "measure shorter inputs, or name other bounds")
    heads = max(1, int(CHUNK // (8 * att.tokens * max(att.d_v * max(att.d, att.d_v), att.tokens))))
    rows, factors = [], torch.tensor(reach, dtype=torch.float64, device=att.device)[:, None]
    with torch.set_grad_enabled(att.cache.recording):
        for sample in samples_of(att):
            found = [
                values(sample.layer, 0, slice(h, min(att.heads, h + heads)))
                for h in range(0, att.heads, heads)
            ]
            rows.append(sample.finished(torch.cat(found).mT, factors).mT)
    return torch.stack(rows)


class Sample(NamedTuple):
    """One sample of a layer, as a float64 layer of ordinary size.

    Attributes:
        layer: of one sample. errors: of its tensors. exponents: (heads,), of the powers of two that
            its J is to be multiplied with.
        exact: (heads,), whether that is all.
    """

    layer: Attention
    errors: TensorErrors
    exponents: Tensor
    exact: Tensor

    def finished(self, values: Tensor, reach: Tensor | float = 1.0) -> Tensor:
        """Bounds on the heads of the given layer, (..., heads), from upper values for this copy but
        for `positive_slack`; ``reach`` as above."""
        with torch.no_grad():
            largest, away = self.layer.p[0].amax((-1, -2)), _distance(self.layer, self.errors)
        return self.closed(values, largest, away, reach)

    def closed(
        self, values: Tensor, largest: Tensor, away: Tensor, reach: Tensor | float = 1.0
    ) -> Tensor:
        """`finished` where P is not at hand: its largest entries, and how far J may be from that of
        the layer's tensors, (heads,) each."""
        one = self.layer
        with torch.no_grad():
            hidden = (
                TINY
                * largest.clamp_min(2.0**-200)
                * (
                    torch.linalg.vector_norm(one.w_v, dim=(1, 2))
                    + one.centred_v[0].norm(dim=-1).amax(-1)
                )
            )
            error = (away + hidden) * (1 + 1e-6) * reach
        total = times_power_up(values * (1 + 2 * positive_slack(one)) + error, self.exponents)
        return torch.where(self.exact & ~total.isnan(), total, torch.inf)


def samples_of(att: Attention) -> Iterator[Sample]:
    """Every sample of a layer, with what depends on weights alone computed once for all where their
    sizes are ordinary."""
    whole = ordinary(att)
    errors = None if whole is None else tensor_errors(whole)
    for s in range(att.samples):
        if whole is None or errors is None:
            one, exponents, exact = unit_scales(att.double().of_samples(slice(s, s + 1)))
            yield Sample(one, tensor_errors(one), exponents, exact[0])
        else:
            one = whole.of_samples(slice(s, s + 1))
            keep_result(weights_of, one, weights_of(whole))
            own = TensorErrors(
                *(getattr(errors, field.name)[s : s + 1] for field in fields(errors))
            )
            every = torch.ones(att.heads, dtype=torch.bool, device=att.device)
            yield Sample(one, own, torch.zeros_like(every, dtype=torch.long), every)


def _distance(one: Attention, errors: TensorErrors) -> Tensor:
    """`lipbound.jacobians.rounding.distance` of one sample, (heads,)."""
    p, e = one.p[0], TensorErrors(*(getattr(errors, field.name)[0] for field in fields(errors)))
    value, key = ((p @ (t**2)[..., None])[..., 0] for t in (e.v, e.k))
    return distance(
        e,
        Moments.of(value, key, 1.0, p.amax(-1), p.sum(-2)),
        one.scale,
        matrix_norm(one.w_v.detach()),
    )


def positive_slack(att: Attention) -> float:
    """What a number from sums, products, roots and minima of numbers >= 0 may lack of its exact
    value, relative: Lemma 77 (docs/theory/upper_values.md)."""
    return gamma(6 * (att.tokens + att.x.shape[2] + 2 * att.d + 2 * att.d_v) + 400)


class BlockNorms:
    """What both bounds are made of, for some heads of one sample of a float64 layer: norms of the
    parts of the blocks of J.

    Second moments of all rows come from one product each: Lemma 52 (docs/theory/numerics.md). Upper
    values but for `positive_slack`.

    Attributes:
        p, v, o: probabilities, centred values, outputs.
        size: |c q_i|, (heads, N).
        qt: :math:`\\tilde q_i`, in coordinates in which it is no
            shorter.
        off_qt: the rounding of its rows.
        qt_norm: :math:`|\\tilde q_i|`, (heads, N, 1).
        distance: :math:`|v_j - o_i|`, (heads, N, N).
        norm_v: :math:`\\|W_V\\|`, (heads, 1, 1).
        b: :math:`\\|B_i\\|`, (heads, N).
        b_v: with ``gram`` alone, :math:`\\|B_i W_V\\|`, (heads, N).
        a: :math:`\\|A_i\\|`, (heads, N); with ``gram`` alone.
        b_q: :math:`|B_i \\tilde q_k|`, (heads, N, N).
    """

    def __init__(self, att: Attention, sample: int, heads: slice, *, gram: bool = False):
        p, q = att.p[sample, heads], att.q[sample, heads]
        k, v = att.centred_k[sample, heads], att.centred_v[sample, heads]
        n, d, inputs = att.tokens, att.d, att.x.shape[2]
        self.p, self.v = p, v
        self.o = o = p @ v
        self.distance = torch.cdist(o, v, compute_mode="donot_use_mm_for_euclid_dist")
        weights = weights_of(att)
        factor_q, factor_k, self.excess, norm_v, size_q, size_k, size_v = (
            w[heads] for w in weights
        )
        self.norm_v = norm_v[:, None, None]
        scaled, self.size = att.scale * q, (size := abs(att.scale) * lengths(q))
        self.qt = scaled @ factor_k.mT
        self.off_qt = gamma(d + 2) * size * size_k[:, None]
        self.qt_norm = (self.qt.norm(dim=-1) + self.off_qt)[..., None]

        # Row by row, since the d_v x d matrices of all rows would not fit.
        length_k, length_v, length_o = lengths(k), lengths(v), lengths(o)
        off = (
            gamma(n + 6)
            * abs(att.scale)
            * (mean(p, length_v * length_k) + length_o * mean(p, length_k))
        )
        rows = RowTensors(p, v, att.scale * k, o, off)
        if not gram:
            self.b = query_norms(rows, factor_q.mT, size_q)
            return
        w_q, w_k, w_v = (w[heads] for w in (att.w_q, att.w_k, att.w_v))
        self.z = (scaled @ (w_k.mT @ w_v)).norm(dim=-1) + gamma(inputs + d + 4) * size * (
            size_k * size_v
        )[:, None]  # |z_i|
        images, reach = scaled @ (w_q.mT @ w_k).mT, size * (size_q * size_k)[:, None]
        self.b, self.b_v, self.b_q = all_norms(
            rows,
            CovarianceFactors(factor_q.mT, w_q.mT @ w_v, size_q, size_v, inputs, images, reach),
        )
        self.a = torch.minimum(
            own_norms(p, v, o), (p * self.distance).norm(dim=-1)
        )  # the latter is exact to rounding where it is tiny

    def block(self) -> Tensor:
        """The compression of J itself, (heads,)."""
        sizes = self.p * (self.norm_v + self.distance * self.qt_norm) + torch.diag_embed(self.b)
        return nonnegative_norm(sizes, rtol=RTOL)

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
        reach = torch.minimum(
            p * self.distance @ p.mT, self.a[..., :, None] * p.norm(dim=-1)[..., None, :]
        )
        x = (
            p * self.b_v[..., None, :]
            + p.mT * self.b_q * self.distance.mT
            + self.z[..., :, None] * reach
        )
        return x + x.mT

    def keys(self) -> Tensor:
        """K."""
        e = self.p * self.distance
        return self.inner() * torch.minimum(self.a[..., :, None] * self.a[..., None, :], e @ e.mT)

    def inner(self) -> Tensor:
        r""":math:`|\tilde q_i \cdot \tilde q_k|`."""
        length, off = lengths(self.qt) + self.off_qt, self.off_qt
        left = torch.stack(
            [
                gamma(self.qt.shape[-1] + 2) * length + 2 * off,
                length,
                self.excess[:, None] * self.size,
            ],
            -1,
        )
        right = torch.stack([length, 2 * off, self.size], -1)
        return (self.qt @ self.qt.mT).abs() + left @ right.mT


@memoised
def weights_of(att: Attention) -> tuple[Tensor, ...]:
    """`upper_factor` of W_Q and W_K, how far the latter's square is above, ||W_V||, and Frobenius
    norms of the first two and of W_V, (heads, ...)."""
    (f_q, _), (f_k, excess) = upper_factor(att.w_q), upper_factor(att.w_k)
    return (
        f_q,
        f_k,
        excess,
        matrix_norm(att.w_v),
        *(torch.linalg.matrix_norm(w.detach()) for w in (f_q, f_k, att.w_v)),
    )
