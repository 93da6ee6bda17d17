"""Gates between the output of a head and its projection."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import NamedAxes, for_each_sample


@dataclass(frozen=True, eq=False)
class Gate(NamedAxes):
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

    axes: ClassVar = {"w": "h..", "b": "h.", "after": "h.."}

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
        after = for_each_sample(self.after, len(x), o.dtype)
        return GateStep(g.flatten(0, 1).to(o.dtype), slope.flatten(0, 1).to(o.dtype), after)


@dataclass(frozen=True, eq=False)
class GateStep(NamedAxes):
    r"""The derivative of `Gate`: :math:`do_i \mapsto (g_i \circ do_i + h_i \circ W^T dx_i)\,M`.

    Attributes:
        factor: g, (batch, N, d_v).
        slope: h, the derivative of the sigmoid times the output, (batch, N, d_v).
        after: M, (batch, d_v, d_v), or None.
    """

    factor: Tensor
    slope: Tensor
    after: Tensor | None

    axes: ClassVar = {"factor": "bn.", "slope": "bn.", "after": "b.."}

    def push(self, out: Tensor, z: Tensor) -> Tensor:
        """Return the perturbation of gated outputs from that of outputs and of logits."""
        y = self.factor * out + self.slope * z
        return y if self.after is None else y @ self.after

    def pull(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return cotangents of outputs and of logits."""
        y = y if self.after is None else y @ self.after.mT
        return self.factor * y, self.slope * y
