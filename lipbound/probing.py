"""Reading the projections of an attention layer off the layer itself, whatever its weights are called and however they are stored."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.errors import CaptureError
from lipbound.recording import Call, handling

Tensors = tuple[Tensor, ...]


@dataclass
class Weights:
    """What probing found for one call: per-head projections in float64, and the output projection if there is one."""

    w: tuple[Tensor, Tensor, Tensor]
    b: tuple[Tensor | None, Tensor | None, Tensor | None]
    w_o: Tensor | None


class _Abort(Exception):
    """Ends a probing pass at the interface, carrying q, k, v."""

    def __init__(self, qkv: Tensors):
        self.qkv = qkv


def probe(call: Call) -> Weights:
    """Feed the layer the tokens 0, e_1, ..., e_D in float64 and read off its affine maps x -> q, k, v, per head.

    The layer is copied, called with the arguments of the recorded call (X replaced), and stopped at the attention interface. Grouped keys
    and values are repeated, one per query head.
    """
    x = hidden_states(call)
    width = x.shape[-1]
    owner = copy.deepcopy(call.module).double()

    def stop(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, Any]:
        raise _Abort((q, k, v))

    def projections(tokens: Tensor) -> Tensors:
        args, kwargs = _replaced(call, tokens)
        try:
            with handling(stop):
                owner(*args, **kwargs)
        except _Abort as end:
            return tuple(t.transpose(1, 2).flatten(0, 1) for t in end.qkv)
        raise CaptureError(f"layer {call.name}: probing did not reach the attention interface")

    parts = [[y[: len(rows)] for y in projections(_fill(rows, x))] for rows in _probe_tokens(width, x)]
    heads = call.q.shape[1]
    weights, biases = [], []
    for pieces in zip(*parts, strict=True):
        y = torch.cat(pieces)  # (D + 1, H or H_kv, d)
        y = y.repeat_interleave(heads // y.shape[1], 1)
        weights.append((y[1:] - y[0]).transpose(0, 1).contiguous())
        biases.append(y[0] if bool((y[0] != 0).any()) else None)
    return Weights((weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]), _probe_output(call))


def _probe_output(call: Call) -> Tensor | None:
    """Slices of the projection that consumes the flattened heads, (heads, d_v, D_out)."""
    if call.consumer is None:
        return None
    heads, d_v = call.q.shape[1], call.v.shape[-1]
    projection = copy.deepcopy(call.consumer).double()
    device = call.q.device
    eye = torch.eye(heads * d_v, dtype=torch.float64, device=device)
    y: Tensor = projection(eye) - projection(torch.zeros_like(eye[:1]))
    return y.view(heads, d_v, -1)


def hidden_states(call: Call) -> Tensor:
    """The owner's input X, its first positional argument or ``hidden_states``."""
    x = call.args[0] if call.args else call.kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise CaptureError(f"layer {call.name}: {type(call.module).__name__} is not given one (samples, N, D) tensor of token vectors")
    if call.k.shape[-2] != x.shape[1] or call.q.shape[-2] != x.shape[1]:
        raise CaptureError(
            f"layer {call.name}: {call.q.shape[-2]} queries attend to {call.k.shape[-2]} keys while the layer's input has {x.shape[1]} tokens; "
            "only self-attention is supported (no cross-attention, no cache, no windows cut out of the input)"
        )
    return x


def _replaced(call: Call, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The owner's arguments with X replaced, floating tensors in float64, and no cache."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return tuple(double(v) for v in value) if isinstance(value, tuple) else value

    kwargs = {name: None if name in ("past_key_values", "layer_past") else double(value) for name, value in call.kwargs.items()}
    if call.args:
        return (x, *(double(a) for a in call.args[1:])), kwargs
    return (), kwargs | {"hidden_states": x}


def _probe_tokens(width: int, like: Tensor) -> Iterator[Tensor]:
    """The rows of [0; I] in pieces of at most the number of token slots, float64."""
    rows = torch.cat([torch.zeros(1, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)]).to(like.device)
    yield from rows.split(like.shape[0] * like.shape[1])


def _fill(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` in the first token slots of a zero tensor shaped like ``like``."""
    slots = torch.zeros(like.shape[0] * like.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device)
    slots[: len(rows)] = rows
    return slots.view(*like.shape[:2], -1)
