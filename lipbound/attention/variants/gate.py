"""Gates between the output of a head and its projection."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import Shapes, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True, eq=False)
class Gate(Variant):
    r"""Outputs :math:`\sigma(W^T x_i + b) \circ o_i\,M` of a head, :math:`\sigma` the sigmoid.

    Qiu et al. 2025, "Gated Attention for Large Language Models", equation (5). J is linear in M,
    in which an output projection is folded.

    Args:
        w: (heads, D, d_v); columns that are the same where a head has one gate.
        b: (heads, d_v), or None.
        after: M, (heads, d_v, d_v), or None for the identity.
    """

    w: Tensor
    b: Tensor | None = None
    after: Tensor | None = None

    name = "gate"
    title = "gated outputs"
    stage = 4
    place = 6
    axes: ClassVar = {"w": "h..", "b": "h.", "after": "h.."}

    def tensors(self) -> dict[str, Tensor]:
        found = {"gate.w": self.w, "gate.b": self.b, "gate.after": self.after}
        return {name: t for name, t in found.items() if t is not None}

    def check(self, shapes: Shapes) -> None:
        expected = shapes.w_v
        bias = self.b is None or tuple(self.b.shape) == (expected[0], expected[2])
        if tuple(self.w.shape) != expected or not bias:
            raise AttentionError(
                f"w and b of a gate must have shapes {expected} and {(expected[0], expected[2])}; "
                f"w has {tuple(self.w.shape)}"
            )

    def logits(self, x: Tensor) -> Tensor:
        """Return what the sigmoid is taken of, (samples, heads, N, d_v), float64."""
        y = torch.einsum("snd,hdv->shnv", x.double(), self.w.double())
        return y if self.b is None else y + self.b.double()[:, None]

    def apply(self, x: Tensor, o: Tensor) -> Tensor:
        """Return gated outputs (samples, heads, N, d_v) of heads, in their dtype."""
        y = (torch.sigmoid(self.logits(x)) * o.double()).to(o.dtype)
        return y if self.after is None else y @ self.after

    def at(self, x: Tensor, o: Tensor) -> "GateStep":
        """Return the derivative at inputs x (samples, N, D) and outputs o (samples, heads, N, d_v).

        In the dtype of o, with the batch of all heads of all samples.
        """
        g = torch.sigmoid(self.logits(x))
        slope = g * (1 - g) * o.double()
        after = self.after
        if after is not None:
            after = after.to(o.dtype).expand(len(x), *after.shape).flatten(0, 1)
        return GateStep(g.flatten(0, 1).to(o.dtype), slope.flatten(0, 1).to(o.dtype), after)

    def followed_by(self, m: Tensor) -> "Gate":
        return replace(self, after=m if self.after is None else self.after @ m)

    def without_biases(self) -> "Gate":
        return replace(self, b=None)

    def of_scaled_inputs(self, exponent: int) -> "Gate":
        first, second = 2.0 ** -(exponent // 2), 2.0 ** -((exponent + 1) // 2)
        return replace(self, w=self.w * first * second)


@dataclass(frozen=True, eq=False)
class GateStep:
    r"""The derivative of `Gate`: :math:`do_i \mapsto (g_i \circ do_i + h_i \circ W^T dx_i)\,M`.

    Attributes:
        factor: g, (batch, N, d_v).
        slope: h, the derivative of the sigmoid times the output, (batch, N, d_v).
        after: M, (batch, d_v, d_v), or None.
    """

    factor: Tensor
    slope: Tensor
    after: Tensor | None

    def push(self, out: Tensor, z: Tensor) -> Tensor:
        """Return the perturbation of gated outputs from that of outputs and of logits."""
        y = self.factor * out + self.slope * z
        return y if self.after is None else y @ self.after

    def pull(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return cotangents of outputs and of logits."""
        y = y if self.after is None else y @ self.after.mT
        return self.factor * y, self.slope * y

    def select(self, index: Tensor | slice) -> "GateStep":
        """Return that of some entries of the batch."""
        after = None if self.after is None else self.after[index]
        return GateStep(self.factor[index], self.slope[index], after)

    def to(self, dtype: torch.dtype) -> "GateStep":
        """Return the same in another dtype."""
        after = None if self.after is None else self.after.to(dtype)
        return GateStep(self.factor.to(dtype), self.slope.to(dtype), after)

    def double(self) -> "GateStep":
        """Return the same in float64."""
        return self.to(torch.float64)
