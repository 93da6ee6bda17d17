"""Heads that are known by the module that computes them, and no closed form."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import AttentionError
from lipbound.schema import AUTOMATIC, CLOSED_FORM, INPUT, STATISTICS

DIFFERENTIATED = ("head", "head_out", "heads", "layer")
"""Maps of heads that are measured through their module."""


@dataclass(frozen=True, eq=False)
class ModuleAttention:
    """An attention layer as a function of one of its streams of tokens.

    Its Jacobian comes from automatic differentiation (`lipbound.jacobians.automatic`); it has no
    tensors of queries, keys and values, and no bounds.

    Attributes:
        stream: the tokens that are perturbed, as the module takes them, float64.
        axis: of the samples in ``stream``; None where all of it is one sample.
        function: takes such a stream to the outputs of all heads, (samples, N, heads, d_v).
        shape: of what ``function`` returns.
        w_o: output projection, (heads, d_v, D_out), or None.
        valid: which tokens of the stream are not padding, (samples, tokens) bool, or None.
        valid_out: the same of the outputs, (samples, N) bool, or None.
        kind: "self", or "cross" where queries and keys are of two streams.
        perturbed: "input" of self-attention, the "queries" or the "memory" of cross-attention.
        windows: how many of the samples belong to one sample of the model.
        reason: why there is no closed form, in words.
        layer: takes such a stream to what is made of the outputs of all heads, (samples, N, D_out),
            where that is no affine map of them.
        details: what else there is to say of its outputs and streams, in words.
    """

    stream: Tensor
    axis: int | None
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int, int]
    w_o: Tensor | None = None
    valid: Tensor | None = None
    valid_out: Tensor | None = None
    kind: str = "self"
    perturbed: str = INPUT
    windows: int = 1
    reason: str = ""
    layer: Callable[[Tensor], Tensor] | None = None
    chosen: tuple[slice, slice] = (slice(None), slice(None))
    details: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = f"{self.samples} samples, {self.heads} heads, {self.tokens} tokens, d_v {self.d_v}"
        how = "; ".join(["by automatic differentiation", *self.details])
        return f"ModuleAttention({sizes}, {self.kind}, {how})"

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(range(self.shape[0])[self.chosen[0]])

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(range(self.shape[2])[self.chosen[1]])

    @property
    def tokens(self) -> int:
        """Number of tokens of the stream, padding included."""
        return self.stream[..., 0].numel() // self.shape[0]

    @property
    def d_v(self) -> int:
        """Width of the output of one head."""
        return self.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """float64, in which the module is run."""
        return self.stream.dtype

    @property
    def device(self) -> torch.device:
        """Where it is run."""
        return self.stream.device

    @property
    def lengths(self) -> Tensor:
        """Number of tokens that are not padding, (samples,)."""
        if self.valid is None:
            return torch.full((self.samples,), self.tokens)
        return self.valid[self.chosen[0]].sum(-1)

    @property
    def variants(self) -> frozenset[str]:
        """Nothing: variants are steps of a closed form."""
        return frozenset()

    def statistics(self) -> dict[str, Tensor]:
        """Return NaN for those of `Attention.statistics`: probabilities are not known."""
        return {name: torch.full((self.samples, self.heads), torch.nan) for name in STATISTICS}

    def select(self, samples: slice = slice(None), heads: slice = slice(None)) -> Self:
        """Return some of its samples and heads; the module still runs on all of them."""
        if self.chosen != (slice(None), slice(None)):
            raise AttentionError("samples or heads were selected already; select from the whole")
        return replace(self, chosen=(samples, heads))

    def of_samples(self, samples: slice) -> Self:
        """Return some of its samples."""
        return self.select(samples)

    def outputs(self, stream: Tensor, map: str) -> Tensor:
        """Return what a map of `DIFFERENTIATED` makes of a stream.

        Args:
            stream: of the shape of ``stream``.
            map: "head" and "head_out" have all heads on axis 1, "heads" and "layer" have one.

        Returns:
            (samples, heads or 1, ...), for all samples and heads, zero at padding.

        Raises:
            AttentionError: the map needs an output projection that was not found, or a closed form.
        """
        if map not in DIFFERENTIATED:
            raise AttentionError(
                f"map {map!r} needs a layer in closed form; of one that is measured by automatic "
                f"differentiation there are {', '.join(DIFFERENTIATED)}"
            )
        if map == "layer" and self.layer is not None:
            whole = self.layer(stream)[:, None]
            return whole if self.valid_out is None else whole * self.valid_out[:, None, :, None]
        out = self.function(stream)
        if self.valid_out is not None:
            out = out * self.valid_out[..., None, None]
        if map == "heads":
            return out[:, None]
        if map == "head":
            return out.transpose(1, 2)
        if self.w_o is None:
            why = "which was not found" if self.layer is None else "and here it is not affine"
            raise AttentionError(f"map {map!r} needs an affine output projection, {why}")
        projected = torch.einsum("snhv,hvo->shno", out, self.w_o.to(out))
        return projected if map == "head_out" else projected.sum(1, keepdim=True)


def described(att: Any) -> dict[str, Any]:
    """Return kind, stream and way of measuring of a layer, as runs name them."""
    measured = AUTOMATIC if isinstance(att, ModuleAttention) else CLOSED_FORM
    return {"kind": att.kind, "stream": att.perturbed, "measured": measured}


def in_closed_form(layers: Iterable[Attention | ModuleAttention], what: str) -> list[Attention]:
    """Return layers that have a closed form.

    Args:
        layers: of a capture.
        what: needs it, in words.

    Raises:
        AttentionError: one of them has none.
    """
    found = []
    for layer in layers:
        if isinstance(layer, ModuleAttention):
            raise AttentionError(
                f"{what} needs layers in closed form, and one is measured by automatic "
                f"differentiation: {layer.reason}"
            )
        found.append(layer)
    return found
