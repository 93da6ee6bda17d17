"""Layer normalisation and residual connections around attention."""

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, NamedAxes
from lipbound.errors import AttentionError


@dataclass(eq=False, repr=False)
class Normaliser(NamedAxes):
    r"""LayerNorm or RMSNorm at a batch of inputs, and its Jacobian there, token by token.

    With :math:`u = (x - \bar x)/s`, :math:`s = (|x - \bar x|^2/D + eps)^{1/2}` (RMSNorm: without
    the mean), the output is :math:`w \circ u + b` and

    .. math:: J\,dx = w \circ \big(dx - \overline{dx} - u\,(u \cdot dx)/D\big)/s

    Its derivation and its norms: Lemma 21 (docs/theory/layers.md).

    Args:
        x: what it normalises, (samples, N, D).
        weight: (D,).
        bias: (D,), or None.
        eps: under the root.
        centred: whether it is LayerNorm, else RMSNorm.

    Attributes:
        unit: u, (samples, N, D).
        size: s, (samples, N, 1), float64.

    Raises:
        AttentionError: weight or bias do not fit the inputs.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    eps: float = 0.0
    centred: bool = True

    axes: ClassVar = {"x": "b..", "weight": ".", "bias": "."}

    def __post_init__(self) -> None:
        self.eps = float(self.eps)
        x, weight, bias = self.x, self.weight, self.bias
        if weight.shape != x.shape[-1:] or (bias is not None and bias.shape != weight.shape):
            raise AttentionError(
                f"a normaliser's weight has shape {tuple(weight.shape)}; for inputs of width "
                f"{x.shape[-1]} it must be ({x.shape[-1]},)"
            )
        deviation = _around_mean(_around_mean(x.double())) if self.centred else x.double()
        # a power of two near them, so that squares stay in range: torch.ldexp takes it by way of
        # float32 in torch 2.4, and this division is exact
        largest = deviation.detach().abs().amax(-1, keepdim=True)
        power = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
        root = (deviation / power).square().mean(-1, keepdim=True).sqrt() * power
        size = torch.hypot(root, torch.full_like(root, self.eps).sqrt())
        self.size = size.clamp_min(torch.finfo(torch.float64).tiny)
        self.unit = (deviation / self.size).to(x.dtype)

    @property
    def out(self) -> Tensor:
        """Outputs, (samples, N, D)."""
        return self.weight * self.unit if self.bias is None else self.weight * self.unit + self.bias

    def jvp(self, dx: Tensor) -> Tensor:
        """Return J dx, (samples, N, D)."""
        return self.weight * self._project(dx)

    def vjp(self, dy: Tensor) -> Tensor:
        """Return J^T dy, (samples, N, D)."""
        return self._project(self.weight * dy)

    def _project(self, dx: Tensor) -> Tensor:
        dx = dx - dx.mean(-1, keepdim=True) if self.centred else dx
        return (dx - self.unit * (self.unit * dx).mean(-1, keepdim=True)) / self.size.to(dx.dtype)

    @property
    def norms(self) -> Tensor:
        r"""Upper values :math:`\max_k |w_k| / s` of the norms of each token's Jacobian.

        (samples, N), float64; infinite where 1/s leaves its range.
        """
        slopes = 1 / self.size[..., 0] * (1 + self.rounding[0]) * (1 + 1e-12)
        slopes = slopes.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return self.weight.double().abs().amax() * slopes

    @cached_property
    def rounding(self) -> tuple[Tensor, Tensor]:
        """Upper values of how far rounding moves 1/s and u, computed in float64, (samples, N) each.

        Relative errors of s and of 1/s; distances of u from that of exact arithmetic: Lemma 21
        (docs/theory/layers.md).
        """
        n, size = self.x.shape[2], self.size[..., 0]
        deviation = torch.zeros_like(size)
        if self.centred:
            around = _around_mean(self.x.double()) / self.size
            deviation = 2 * (n + 4) * UNIT * torch.linalg.vector_norm(around, dim=-1)
        off = deviation / n**0.5 + (n + 8) * UNIT
        off = torch.where(off < 0.25, off / (1 - off), torch.inf)
        unit = torch.linalg.vector_norm(self.unit.double(), dim=-1)
        return off, deviation * (1 + off) + unit * (off + 4 * UNIT)


def _around_mean(x: Tensor) -> Tensor:
    """Return vectors (..., D) less their means.

    Of vectors that are long beside their deviations this leaves a part of what rounding took from
    the mean, which a second time takes away.
    """
    return x - x.mean(-1, keepdim=True)


@dataclass
class ResidualContext(NamedAxes):
    """Layer normalisation and residual connection around an attention layer in its model.

    Attributes:
        fed_by: the normaliser whose output is the layer's input, or None.
        residual: "pre" for h + layer(norm(h)), norm being ``fed_by``; "post" for x + layer(x); None
            for neither.
        followed_by: the normaliser of x + layer(x) under "post", or None.
    """

    fed_by: Normaliser | None = None
    residual: str | None = None
    followed_by: Normaliser | None = None

    axes: ClassVar = {"fed_by": "", "followed_by": ""}
