"""RMS normalisation of queries and of keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, Shapes, Side, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class QKNorm:
    r"""RMS normalisation of queries or of keys after their projection and before any rotation
    ("q/k-norm").

    With y a head's projected vector and t what is normalised together (y itself, or the vectors of
    all heads), n entries long,

    .. math:: y \mapsto gain \circ y / s + bias,\qquad s = (|t|^2 / n + eps)^{1/2}

    LayerNorm is this map after a projection whose columns have had their mean over the n entries
    taken away. Henry et al. 2020, "Query-Key Normalization for Transformers"; Dehghani et al. 2023
    for the form with gains.

    Args:
        gain: (heads, d). bias: (heads, d), or None.
        eps: under the root.
        over: projection (D, n) and bias (n,) or None of what is normalised together; None: each
            head's own vector.

    Raises:
        AttentionError: shapes that do not fit, NaN or infinite entries, a negative eps.
    """

    gain: Tensor
    bias: Tensor | None = None
    eps: float = 0.0
    over: tuple[Tensor, Tensor | None] | None = None

    def __post_init__(self) -> None:
        if self.gain.ndim != 2 or (self.bias is not None and self.bias.shape != self.gain.shape):
            raise AttentionError(
                f"gain of a normalisation has shape {tuple(self.gain.shape)}; it must be (heads, "
                "d), and bias the same"
            )
        if (
            not all(bool(torch.isfinite(t).all()) for t in self.tensors())
            or not 0 <= self.eps < torch.inf
        ):
            raise AttentionError("a normalisation has NaN or infinite numbers, or a negative eps")

    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        return [t for t in (self.gain, self.bias, *(self.over or ())) if t is not None]

    def together(self, x: Tensor) -> Tensor | None:
        """What is normalised together at inputs (samples, N, D), float64 (samples, N, n); None
        where each head is by itself."""
        if self.over is None:
            return None
        w, b = self.over
        t = x.double() @ w.double()
        return t if b is None else t + b.double()

    def sizes(self, x: Tensor, y: Tensor) -> Tensor:
        """s for projected vectors y (samples, heads, N, d) of inputs x (samples, N, D): float64,
        (samples, heads or 1, N, 1); 1 where it is zero."""
        t = self.together(x)
        squares = (y if t is None else t[:, None]).square().mean(-1, keepdim=True) + self.eps
        return torch.where(squares > 0, squares, 1.0).sqrt()

    def undefined(self, x: Tensor, y: Tensor, valid: Tensor | None) -> bool:
        """Whether a vector of length zero is to be normalised without eps, tokens that are not
        ``valid`` (samples, N) left out."""
        if self.eps > 0:
            return False
        t = self.together(x)
        zero = (y if t is None else t[:, None]).square().sum(-1) == 0
        return bool((zero if valid is None else zero & valid[:, None]).any())

    def apply(self, x: Tensor, y: Tensor) -> Tensor:
        """The normalised vectors, float64, shaped like y."""
        out = y / self.sizes(x, y) * self.gain.double()[:, None]
        return out if self.bias is None else out + self.bias.double()[:, None]

    def rounded(self, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """As `Variant.rounded`: Lemma 69 (docs/theory/rounding.md)."""
        gain = self.gain.double().abs().amax(-1)[:, None]
        size, length = self.sizes(x, y)[..., 0], torch.linalg.vector_norm(y, dim=-1)
        if self.over is None:
            n, shared, error, reach = y.shape[-1], length, before.error, torch.zeros(())
        else:
            w, b = self.over[0].double(), self.over[1]
            n, reach = w.shape[1], torch.linalg.matrix_norm(w)
            bias = 0.0 if b is None else torch.linalg.vector_norm(b.double())
            shared = torch.linalg.vector_norm(self.together(x), dim=-1)[:, None]
            error = (
                (2 * (len(w) + 4) * UNIT)
                * (torch.linalg.vector_norm(x.double(), dim=-1) * reach + bias)
            )[:, None]
        off = error / (size * n**0.5) + (n + 8) * UNIT  # relative error of the size
        off = torch.where(off < 0.25, off / (1 - off), torch.inf)
        unit = length / size
        unit_error = before.error / size * (1 + off) + unit * off
        turned = (
            (2 * unit * unit_error + unit_error**2) / n if self.over is None else torch.zeros(())
        )
        slope = gain / size * (before.slope + unit * reach / n**0.5)
        slope_error = (
            gain
            / size
            * ((1 + off) * before.slope_error + (off + turned + 16 * UNIT) * before.slope)
        )
        if self.over is not None:
            sums = (n + x.shape[-1] + 16) * UNIT
            turn = unit_error * (1 + off) + unit * (
                error / (size * n**0.5) + off * shared / (size * n**0.5) + off + sums
            )
            slope_error = slope_error + gain / size * reach / n**0.5 * turn
        bias = (
            0.0
            if self.bias is None
            else self.bias.double().abs().amax(-1)[:, None] * self.bias.shape[1] ** 0.5
        )
        return Passing(gain * unit_error + 8 * UNIT * (gain * unit + bias), slope, slope_error)

    def select(self, heads: slice) -> "QKNorm":
        """Some of the heads."""
        return replace(
            self, gain=self.gain[heads], bias=None if self.bias is None else self.bias[heads]
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "QKNorm":
        """With changed tensors."""
        over = (
            None
            if self.over is None
            else (change(self.over[0]), None if self.over[1] is None else change(self.over[1]))
        )
        return QKNorm(
            change(self.gain), None if self.bias is None else change(self.bias), self.eps, over
        )

    def check(self, name: str, shapes: Shapes) -> None:
        """Raise AttentionError where it does not fit a layer; ``name`` is the layer's for it."""
        expected, width = (shapes.w_q[0], shapes.w_q[2]), shapes.x[2]
        if self.gain.shape != expected:
            raise AttentionError(
                f"{name} has gains of shape {tuple(self.gain.shape)}; with w_q {shapes.w_q} it "
                f"must be {expected}"
            )
        if self.over is not None and self.over[0].shape[0] != width:
            raise AttentionError(
                f"{name} normalises a projection of shape {tuple(self.over[0].shape)}; with x "
                f"{shapes.x} it must be ({width}, n)"
            )


@dataclass(frozen=True)
class QKNormalised(Variant):
    """Queries normalised by one `QKNorm`, keys by another; either may be None."""

    q: QKNorm | None
    k: QKNorm | None

    name = "qk_norm"
    title = "normalised queries and keys"
    stage = 0
    place = 1

    def _of(self, side: Side) -> QKNorm | None:
        return self.q if side == "q" else self.k

    @property
    def parts(self) -> list[str]:
        return [name for name, norm in (("norm_q", self.q), ("norm_k", self.k)) if norm is not None]

    def inputs(self) -> list[Tensor]:
        return [t for norm in (self.q, self.k) if norm is not None for t in norm.tensors()]

    def check(self, shapes: Shapes) -> None:
        for name, norm in (("norm_q", self.q), ("norm_k", self.k)):
            if norm is not None:
                norm.check(name, shapes)

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        norm = self._of(side)
        if norm is None:
            return y
        if norm.undefined(x, y, valid):
            raise AttentionError(
                "a query or key of length zero is normalised without eps, which is not defined; "
                "give an eps"
            )
        return norm.apply(x, y)

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
        return [
            norm.over[0] for norm in (self.q, self.k) if norm is not None and norm.over is not None
        ]

    def _each(self, change: Callable[[QKNorm], QKNorm]) -> "QKNormalised":
        return QKNormalised(*(None if norm is None else change(norm) for norm in (self.q, self.k)))

    def of_heads(self, heads: slice) -> "QKNormalised":
        return self._each(lambda norm: norm.select(heads))

    def without_biases(self) -> "QKNormalised":
        return self._each(
            lambda norm: norm if norm.over is None else replace(norm, over=(norm.over[0], None))
        )

    def of_scaled_inputs(self, exponent: int) -> "QKNormalised":
        first, second = 2.0 ** -(exponent // 2), 2.0 ** -((exponent + 1) // 2)
        return self._each(
            lambda norm: (
                norm
                if norm.over is None
                else replace(norm, over=(norm.over[0] * first * second, norm.over[1]))
            )
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "QKNormalised":
        return self._each(lambda norm: norm.map(change))


@dataclass(frozen=True, eq=False)
class NormStep:
    r"""The derivative of `QKNorm`, token by token: :math:`dy \mapsto gain \circ (dy - u\,\tau)/s`
    with u = y / s.

    Where a head's own vector is normalised :math:`\tau = u \cdot dy / d`; where all heads' are
    together it is a coordinate of its own, :math:`\tau = g \cdot dx`, with ``direction`` g =
    :math:`T (t/s) / n` for the projection T of what is normalised together: Lemma 5
    (docs/theory/jacobian.md).

    Attributes:
        unit: u, (batch, N, d). gain: gain / s, (batch, N, d).
        direction: (samples, N, D) in the dtype of the products, or None.
    """

    unit: Tensor
    gain: Tensor
    direction: Tensor | None = None

    @staticmethod
    def of(norm: QKNorm, x: Tensor, y: Tensor, dtype: torch.dtype) -> "NormStep":
        """At inputs x (samples, N, D) and projected vectors y (samples, heads, N, d), float64."""
        sizes = norm.sizes(x, y)
        unit = (y / sizes).flatten(0, 1).to(dtype)
        gain = (norm.gain.double()[:, None] / sizes).flatten(0, 1).to(dtype)
        together = norm.together(x)
        if norm.over is None or together is None:
            return NormStep(unit, gain)
        return NormStep(
            unit,
            gain,
            (together / sizes[:, 0] @ norm.over[0].double().mT / together.shape[-1]).to(dtype),
        )

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        """Perturbations as they go on."""
        share = (self.unit * z).mean(-1, keepdim=True) if extra is None else extra
        return (z - self.unit * share) * self.gain

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """The transpose."""
        g = g * self.gain
        inner = self.unit * g
        if self.direction is None:
            return g - self.unit * inner.mean(-1, keepdim=True), None
        return g, -inner.sum(-1, keepdim=True)

    def select(self, index: Tensor | slice) -> "NormStep":
        """Some entries of the batch."""
        return replace(self, unit=self.unit[index], gain=self.gain[index])

    def of_tokens(self, tokens: slice | Tensor) -> "NormStep":
        """Some tokens; ``direction`` stays."""
        return replace(self, unit=self.unit[:, tokens], gain=self.gain[:, tokens])

    def double(self) -> "NormStep":
        """With products in float64."""
        return NormStep(
            self.unit.double(),
            self.gain.double(),
            None if self.direction is None else self.direction.double(),
        )

    def turns(self) -> None:
        """It turns nothing."""
