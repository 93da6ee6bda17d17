"""RMS normalisation of queries, of keys or of values."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, NamedAxes, Passing, TokenStep, for_each_sample
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class QKNorm(NamedAxes):
    r"""RMS normalisation of queries, keys or values after their projection ("q/k-norm").

    It comes before any rotation. With y a head's projected vector and t what is normalised together
    (y itself, the vectors of all heads, or a vector that y is a projection of), n entries long,

    .. math:: y \mapsto (gain \circ y / s + bias)\,M,\qquad s = (|t|^2 / n + eps)^{1/2}

    LayerNorm is this map after a projection whose columns have had their mean over the n entries
    taken away. Henry et al. 2020, "Query-Key Normalization for Transformers"; Dehghani et al. 2023
    for the form with gains. In latent attention (DeepSeek-V2 2024, section 2.1) t is the latent
    vector, y its projection before it is normalised, and of keys only a part is normalised. Gemma 4
    normalises each head's values; J is linear in their M, in which an output projection is folded.

    Args:
        gain: (heads, d).
        bias: (heads, d), or None.
        eps: under the root.
        over: projection (D, n) and bias (n,) or None of what is normalised together; None: each
            head's own vector.
        part: coordinates that are normalised, (d,) bool, where ``over`` is given; None for all. The
            others are multiplied by ``gain`` alone.
        after: M, (heads, d, d), of values; None for the identity.

    Raises:
        AttentionError: shapes that do not fit, a negative eps.
    """

    gain: Tensor
    bias: Tensor | None = None
    eps: float = 0.0
    over: tuple[Tensor, Tensor | None] | None = None
    part: Tensor | None = None
    after: Tensor | None = None

    axes: ClassVar = {"gain": "h.", "bias": "h.", "over": "..", "part": ".", "after": "h.."}

    def __post_init__(self) -> None:
        if (part := self.part) is not None and (
            self.over is None or part.dtype != torch.bool or part.shape != self.gain.shape[1:]
        ):
            raise AttentionError(
                f"part of a normalisation must be ({self.gain.shape[-1]},) bool, and over be given"
            )
        if self.gain.ndim != 2 or (self.bias is not None and self.bias.shape != self.gain.shape):
            raise AttentionError(
                f"gain of a normalisation has shape {tuple(self.gain.shape)}; it must be (heads, "
                "d), and bias the same"
            )
        if not 0 <= self.eps < torch.inf:
            raise AttentionError(f"eps of a normalisation is {self.eps}; it must be 0 or more")

    def together(self, x: Tensor) -> Tensor | None:
        """Return what is normalised together at inputs x (samples, N, D), (samples, N, n) float64.

        None where each head is by itself.
        """
        if self.over is None:
            return None
        w, b = self.over
        t = x.double() @ w.double()
        return t if b is None else t + b.double()

    def _whole(self, x: Tensor, y: Tensor) -> Tensor:
        t = self.together(x)
        return y if t is None else t[:, None]

    def sizes(self, x: Tensor, y: Tensor) -> Tensor:
        """Return s, (samples, heads or 1, N, 1), float64; 1 where it is zero.

        Args:
            x: inputs, (samples, N, D).
            y: projected vectors, (samples, heads, N, d).
        """
        squares = self._whole(x, y).square().mean(-1, keepdim=True) + self.eps
        return torch.where(squares > 0, squares, 1.0).sqrt()

    def divided(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return y / s, and s entry by entry: 1 where coordinates are not normalised."""
        sizes = self.sizes(x, y)
        if self.part is not None:
            sizes = torch.where(self.part, sizes, 1.0)
        return y / sizes, sizes

    def enter(self, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Return projected vectors (samples, heads, N, d) as they go on, float64.

        Args:
            x: inputs, (samples, N, D).
            y: the vectors.
            valid: tokens that are not padding, (samples, N) bool, or None.

        Raises:
            AttentionError: a vector of length zero is normalised without eps.
        """
        if self.eps == 0:
            zero = self._whole(x, y).square().sum(-1) == 0
            if bool((zero if valid is None else zero & valid[:, None]).any()):
                raise AttentionError(
                    "a query, key or value of length zero is normalised without eps, which is not "
                    "defined; give an eps"
                )
        y = self.shifted(x, y)
        return y if self.after is None else y @ self.after.double()

    def shifted(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the normalised vectors before M, float64, shaped like y."""
        out = self.divided(x, y)[0] * self.gain.double()[:, None]
        return out if self.bias is None else out + self.bias.double()[:, None]

    def rounded(self, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """Return what this makes of upper values about vectors y, its rounding included.

        Lemma 69 (docs/theory/rounding.md).
        """
        if self.after is not None:
            found = replace(self, after=None).rounded(x, y, before)
            norm = torch.linalg.matrix_norm(self.after.double())[:, None]
            own = 2 * (self.after.shape[-1] + 8) * UNIT
            return Passing(
                norm * (found.error * (1 + own) + own * _length(self.shifted(x, y))),
                norm * found.slope,
                norm * (found.slope_error * (1 + own) + own * found.slope),
            )
        gain = self.gain.double().abs().amax(-1)[:, None]
        shift: Tensor | float = 0.0
        if self.bias is not None:
            shift = self.bias.double().abs().amax(-1)[:, None] * self.bias.shape[1] ** 0.5
        if self.part is not None:  # a sum of what is normalised and what is not
            whole = replace(self, part=None, bias=None).rounded(x, y, before)
            rest = gain * before.slope
            error = gain * before.error + 8 * UNIT * (gain * _length(y) + shift)
            return Passing(
                whole.error + error,
                whole.slope + rest,
                whole.slope_error + gain * before.slope_error + 16 * UNIT * rest,
            )
        size, length = self.sizes(x, y)[..., 0], _length(y)
        n, error, reach = y.shape[-1], before.error, torch.zeros(())
        if self.over is not None:
            w, b = self.over[0].double(), self.over[1]
            n, reach = w.shape[1], torch.linalg.matrix_norm(w)
            bias = 0.0 if b is None else torch.linalg.vector_norm(b.double())
            error = ((2 * (len(w) + 4) * UNIT) * (_length(x.double()) * reach + bias))[:, None]
        moved = error / (size * n**0.5)
        off = moved + (n + 8) * UNIT  # relative error of the size
        off = torch.where(off < 0.25, off / (1 - off), torch.inf)
        unit = length / size
        unit_error = before.error / size * (1 + off) + unit * off
        turned = (2 * unit * unit_error + unit_error**2) / n if self.over is None else 0.0
        slope = gain / size * (before.slope + unit * reach / n**0.5)
        rounding = (off + turned + 16 * UNIT) * before.slope
        slope_error = gain / size * ((1 + off) * before.slope_error + rounding)
        if self.over is not None:
            sums = (n + x.shape[-1] + 16) * UNIT
            own = moved + off * _length(self._whole(x, y)) / (size * n**0.5) + off + sums
            turn = unit_error * (1 + off) + unit * own
            slope_error = slope_error + gain / size * reach / n**0.5 * turn
        return Passing(gain * unit_error + 8 * UNIT * (gain * unit + shift), slope, slope_error)


@dataclass(frozen=True, eq=False)
class NormStep(TokenStep):
    r"""The derivative of `QKNorm`, token by token.

    :math:`dy \mapsto (gain \circ (dy - u\,\tau)/s)\,M` with u = y / s. Where a head's own vector is
    normalised :math:`\tau = u \cdot dy / d`; where all heads' are together it is a coordinate of
    its own, :math:`\tau = g \cdot dx`, with ``direction`` g = :math:`T (t/s) / n` for the
    projection T of what is normalised together: Lemma 5 (docs/theory/jacobian.md).

    Attributes:
        unit: u, (batch, N, d).
        gain: gain / s, (batch, N, d).
        after: M, (batch, d, d), or None.
        direction: (samples, N, D) in the dtype of the products, or None.
    """

    unit: Tensor
    gain: Tensor
    after: Tensor | None = None
    direction: Tensor | None = None

    axes: ClassVar = {"unit": "bn.", "gain": "bn.", "after": "b..", "direction": "..."}

    @staticmethod
    def of(norm: QKNorm, x: Tensor, y: Tensor, dtype: torch.dtype) -> "NormStep":
        """Return that at inputs x (samples, N, D), projected to y (samples, heads, N, d)."""
        unit, divisors = norm.divided(x, y)
        if norm.part is not None:
            unit = unit * norm.part
        unit, after = unit.flatten(0, 1).to(dtype), for_each_sample(norm.after, len(x), dtype)
        gain = (norm.gain.double()[:, None] / divisors).flatten(0, 1).to(dtype)
        together = norm.together(x)
        if norm.over is None or together is None:
            return NormStep(unit, gain, after)
        unit_of_all = together / norm.sizes(x, y)[:, 0]
        direction = unit_of_all @ norm.over[0].double().mT / together.shape[-1]
        return NormStep(unit, gain, after, direction.to(dtype))

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return perturbations as they go on."""
        share = (self.unit * z).mean(-1, keepdim=True) if extra is None else extra
        z = (z - self.unit * share) * self.gain
        return z if self.after is None else z @ self.after

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the transposed map of g."""
        g = (g if self.after is None else g @ self.after.mT) * self.gain
        inner = self.unit * g
        if self.direction is None:
            return g - self.unit * inner.mean(-1, keepdim=True), None
        return g, -inner.sum(-1, keepdim=True)


def _length(y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(y, dim=-1)
