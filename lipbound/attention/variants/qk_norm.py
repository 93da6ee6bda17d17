"""RMS normalisation of queries, of keys or of values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, Shapes, Side, Variant
from lipbound.attention.variants.named_axes import NamedAxes
from lipbound.attention.variants.token_maps import TokenStep
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class QKNorm(NamedAxes):
    r"""RMS normalisation of queries, keys or values after their projection ("q/k-norm").

    It comes before any rotation. With y a head's projected vector and t what is normalised together
    (y itself, the vectors of all heads, or a vector that y is a projection of), n entries long,

    .. math:: y \mapsto gain \circ y / s + bias,\qquad s = (|t|^2 / n + eps)^{1/2}

    LayerNorm is this map after a projection whose columns have had their mean over the n entries
    taken away. Henry et al. 2020, "Query-Key Normalization for Transformers"; Dehghani et al. 2023
    for the form with gains. In latent attention (DeepSeek-V2 2024, section 2.1) t is the latent
    vector, y its projection before it is normalised, and of keys only a part is normalised.

    Args:
        gain: (heads, d).
        bias: (heads, d), or None.
        eps: under the root.
        over: projection (D, n) and bias (n,) or None of what is normalised together; None: each
            head's own vector.
        part: coordinates that are normalised, (d,) bool, where ``over`` is given; None for all. The
            others are multiplied by ``gain`` alone.

    Raises:
        AttentionError: shapes that do not fit, NaN or infinite entries, a negative eps.
    """

    gain: Tensor
    bias: Tensor | None = None
    eps: float = 0.0
    over: tuple[Tensor, Tensor | None] | None = None
    part: Tensor | None = None

    axes: ClassVar = {"gain": "h.", "bias": "h.", "over": "..", "part": "."}

    def __post_init__(self) -> None:
        if self.part is not None and (
            self.over is None
            or self.part.dtype != torch.bool
            or self.part.shape != self.gain.shape[1:]
        ):
            raise AttentionError(
                f"part of a normalisation must be ({self.gain.shape[-1]},) bool, and over be given"
            )
        if self.gain.ndim != 2 or (self.bias is not None and self.bias.shape != self.gain.shape):
            raise AttentionError(
                f"gain of a normalisation has shape {tuple(self.gain.shape)}; it must be (heads, "
                "d), and bias the same"
            )
        finite = all(bool(torch.isfinite(t).all()) for t in self.inputs())
        if not (finite and 0 <= self.eps < torch.inf):
            raise AttentionError("a normalisation has NaN or infinite numbers, or a negative eps")

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

    def undefined(self, x: Tensor, y: Tensor, valid: Tensor | None) -> bool:
        """Return whether a vector of length zero is to be normalised without eps.

        Tokens that are not ``valid`` (samples, N) are left out.
        """
        if self.eps > 0:
            return False
        zero = self._whole(x, y).square().sum(-1) == 0
        return bool((zero if valid is None else zero & valid[:, None]).any())

    def enter(self, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Return the normalised vectors as `apply` does.

        Raises:
            AttentionError: `undefined`.
        """
        if self.undefined(x, y, valid):
            raise AttentionError(
                "a query, key or value of length zero is normalised without eps, which is not "
                "defined; give an eps"
            )
        return self.apply(x, y)

    def apply(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the normalised vectors, float64, shaped like y."""
        out = self.divided(x, y)[0] * self.gain.double()[:, None]
        return out if self.bias is None else out + self.bias.double()[:, None]

    def rounded(self, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """Return upper values as `Variant.rounded` does: Lemma 69 (docs/theory/rounding.md)."""
        gain = self.gain.double().abs().amax(-1)[:, None]
        if self.part is not None:
            whole = replace(self, part=None, bias=None).rounded(x, y, before)
            rest = gain * before.slope
            error = gain * before.error + 8 * UNIT * (gain * _length(y) + self._shift())
            return Passing(
                whole.error + error,
                whole.slope + rest,
                whole.slope_error + gain * before.slope_error + 16 * UNIT * rest,
            )
        size, length = self.sizes(x, y)[..., 0], _length(y)
        alone, zero = self.over is None, torch.zeros(())
        if self.over is None:
            n, shared, error, reach = y.shape[-1], length, before.error, zero
        else:
            w, b = self.over[0].double(), self.over[1]
            n, reach = w.shape[1], torch.linalg.matrix_norm(w)
            bias = 0.0 if b is None else torch.linalg.vector_norm(b.double())
            shared = torch.linalg.vector_norm(self.together(x), dim=-1)[:, None]
            projected = torch.linalg.vector_norm(x.double(), dim=-1) * reach + bias
            error = ((2 * (len(w) + 4) * UNIT) * projected)[:, None]
        moved = error / (size * n**0.5)
        off = moved + (n + 8) * UNIT  # relative error of the size
        off = torch.where(off < 0.25, off / (1 - off), torch.inf)
        unit = length / size
        unit_error = before.error / size * (1 + off) + unit * off
        turned = (2 * unit * unit_error + unit_error**2) / n if alone else zero
        slope = gain / size * (before.slope + unit * reach / n**0.5)
        rounding = (off + turned + 16 * UNIT) * before.slope
        slope_error = gain / size * ((1 + off) * before.slope_error + rounding)
        if not alone:
            sums = (n + x.shape[-1] + 16) * UNIT
            own = moved + off * shared / (size * n**0.5) + off + sums
            turn = unit_error * (1 + off) + unit * own
            slope_error = slope_error + gain / size * reach / n**0.5 * turn
        shifted = 8 * UNIT * (gain * unit + self._shift())
        return Passing(gain * unit_error + shifted, slope, slope_error)

    def _shift(self) -> Tensor | float:
        if self.bias is None:
            return 0.0
        return self.bias.double().abs().amax(-1)[:, None] * self.bias.shape[1] ** 0.5

    def without_biases(self) -> "QKNorm":
        """Return that for projections without biases; its own shift stays."""
        return self if self.over is None else replace(self, over=(self.over[0], None))

    def of_scaled_inputs(self, exponent: int) -> "QKNorm":
        """Return that for inputs times 2 to the exponent."""
        if self.over is None:
            return self
        first, second = 2.0 ** -(exponent // 2), 2.0 ** -((exponent + 1) // 2)
        return replace(self, over=(self.over[0] * first * second, self.over[1]))

    def check(self, name: str, shapes: Shapes) -> None:
        """Check that it fits a layer, where it is called norm_q, norm_k or norm_v.

        Raises:
            AttentionError: it does not.
        """
        side, w = ("w_v", shapes.w_v) if name == "norm_v" else ("w_q", shapes.w_q)
        expected, width = (w[0], w[2]), shapes.x[2]
        if self.gain.shape != expected:
            raise AttentionError(
                f"{name} has gains of shape {tuple(self.gain.shape)}; with {side} {w} it must be "
                f"{expected}"
            )
        if self.over is not None and self.over[0].shape[0] != width:
            raise AttentionError(
                f"{name} normalises a projection of shape {tuple(self.over[0].shape)}; with x "
                f"{shapes.x} it must be ({width}, n)"
            )


@dataclass(frozen=True)
class QKNormalised(Variant):
    """Queries normalised by one `QKNorm`, keys by another; either may be None.

    Args:
        q, k: of queries, and of keys.
        late: whether that is after the rotation (Hunyuan).
    """

    q: QKNorm | None
    k: QKNorm | None
    late: bool = False

    name = "qk_norm"
    title = "normalised queries and keys"
    stage = 0
    place = 1
    axes: ClassVar = {"q": "", "k": ""}

    @property
    def order(self) -> float:
        return 1.5 if self.late else self.stage

    def _of(self, side: Side) -> QKNorm | None:
        return {"q": self.q, "k": self.k, "v": None}[side]

    @property
    def parts(self) -> list[str]:
        return [name for name, norm in (("norm_q", self.q), ("norm_k", self.k)) if norm is not None]

    def check(self, shapes: Shapes) -> None:
        for name, norm in (("norm_q", self.q), ("norm_k", self.k)):
            if norm is not None:
                norm.check(name, shapes)

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        norm = self._of(side)
        return y if norm is None else norm.enter(x, y, valid)

    def acts_on(self, side: Side) -> bool:
        return self._of(side) is not None

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> "NormStep | None":
        norm = self._of(side)
        return None if norm is None else NormStep.of(norm, x, y(), dtype)

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        norm = self._of(side)
        return before if norm is None else norm.rounded(x, y, before)

    def spans(self) -> list[Tensor]:
        norms = [norm for norm in (self.q, self.k) if norm is not None]
        return [norm.over[0] for norm in norms if norm.over is not None]

    def _each(self, change: Callable[[QKNorm], QKNorm]) -> "QKNormalised":
        q, k = (None if norm is None else change(norm) for norm in (self.q, self.k))
        return QKNormalised(q, k, self.late)

    def without_biases(self) -> "QKNormalised":
        return self._each(QKNorm.without_biases)

    def of_scaled_inputs(self, exponent: int) -> "QKNormalised":
        return self._each(lambda norm: norm.of_scaled_inputs(exponent))


@dataclass(frozen=True, eq=False)
class NormStep(TokenStep):
    r"""The derivative of `QKNorm`, token by token.

    :math:`dy \mapsto gain \circ (dy - u\,\tau)/s` with u = y / s. Where a head's own vector is
    normalised :math:`\tau = u \cdot dy / d`; where all heads' are together it is a coordinate of
    its own, :math:`\tau = g \cdot dx`, with ``direction`` g = :math:`T (t/s) / n` for the
    projection T of what is normalised together: Lemma 5 (docs/theory/jacobian.md).

    Attributes:
        unit: u, (batch, N, d).
        gain: gain / s, (batch, N, d).
        direction: (samples, N, D) in the dtype of the products, or None.
    """

    unit: Tensor
    gain: Tensor
    direction: Tensor | None = None

    @staticmethod
    def of(norm: QKNorm, x: Tensor, y: Tensor, dtype: torch.dtype) -> "NormStep":
        """Return that at inputs x (samples, N, D), projected to y (samples, heads, N, d)."""
        unit, divisors = norm.divided(x, y)
        if norm.part is not None:
            unit = unit * norm.part
        unit = unit.flatten(0, 1).to(dtype)
        gain = (norm.gain.double()[:, None] / divisors).flatten(0, 1).to(dtype)
        together = norm.together(x)
        if norm.over is None or together is None:
            return NormStep(unit, gain)
        unit_of_all = together / norm.sizes(x, y)[:, 0]
        direction = unit_of_all @ norm.over[0].double().mT / together.shape[-1]
        return NormStep(unit, gain, direction.to(dtype))

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        """Return perturbations as they go on."""
        share = (self.unit * z).mean(-1, keepdim=True) if extra is None else extra
        return (z - self.unit * share) * self.gain

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the transposed map of g."""
        g = g * self.gain
        inner = self.unit * g
        if self.direction is None:
            return g - self.unit * inner.mean(-1, keepdim=True), None
        return g, -inner.sum(-1, keepdim=True)

    def select(self, index: Tensor | slice) -> "NormStep":
        """Return that of some entries of the batch."""
        return replace(self, unit=self.unit[index], gain=self.gain[index])

    def of_tokens(self, tokens: slice | Tensor) -> "NormStep":
        """Return that of some tokens; ``direction`` stays."""
        return replace(self, unit=self.unit[:, tokens], gain=self.gain[:, tokens])

    def double(self) -> "NormStep":
        """Return the same with products in float64."""
        direction = None if self.direction is None else self.direction.double()
        return NormStep(self.unit.double(), self.gain.double(), direction)


def _length(y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(y, dim=-1)
