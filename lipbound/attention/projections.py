"""Projections of a layer to queries, keys and values, and of the outputs of its heads."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lipbound.attention.variants.base import Side


@dataclass(frozen=True, eq=False)
class Projections:
    """Weights and biases of all heads, in one dtype.

    Args:
        w_q, w_k: (heads, D, d). Grouped keys are repeated, one per head.
        w_v: (heads, D, d_v).
        b_q, b_k, b_v: (heads, d), (heads, d), (heads, d_v), or None for no bias.
        w_o: each head's slice of the output projection, (heads, d_v, D_out), or None when it is not
            known.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    w_o: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return those that are there, by name."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t for name, t in every.items() if t is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Projections":
        """Return the same with changed tensors."""
        return replace(self, **{name: change(t) for name, t in self.tensors().items()})

    def of(self, side: Side) -> tuple[Tensor, Tensor | None]:
        """Return the weights and the bias of queries, keys or values."""
        found = {"q": (self.w_q, self.b_q), "k": (self.w_k, self.b_k), "v": (self.w_v, self.b_v)}
        return found[side]

    def of_heads(self, heads: slice) -> "Projections":
        """Return those of some of the heads."""
        return self.map(lambda t: t[heads])

    def without_biases(self) -> "Projections":
        """Return the weights alone."""
        return replace(self, b_q=None, b_k=None, b_v=None)


def projected(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Return tokens (samples, N, D) projected for each head, (samples, heads, N, d), in float64.

    Cancellations within a projection would otherwise cost digits of everything after it.

    Args:
        x: the tokens.
        w: weights, (heads, D, d).
        b: biases, (heads, d), or None.
    """
    y = torch.einsum("snd,hde->shne", x.double(), w.double())
    return y if b is None else y + b[:, None]
