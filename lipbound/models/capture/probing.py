"""Reading the projections of an attention layer off the layer itself, whatever its weights are
called and however they are stored.

The layer is copied, fed chosen tokens in float64, and stopped at the attention interface. Position
embeddings are replaced by those that turn nothing, and normalisations of queries and keys by what
they do linearly, so that what remains is affine in the tokens; both are read off separately.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError
from lipbound.models.capture.norm_stub import read_normalisations
from lipbound.models.capture.probed_layer import POSITIONS, ProbedLayer, Tensors, same_values
from lipbound.models.capture.recorder import Call, hidden_states
from lipbound.models.offload import plain_copy

CAPTURE_TOLERANCE = 1e-4
"""Largest relative error of a rebuilt tensor. Affine projections rebuild to 1e-5 or better in
float32, others miss by orders of magnitude."""
CHECKED = 64
"""How many of the recorded outputs of all heads tell whether their projection is affine."""


class Turns(NamedTuple):
    """Position embeddings of a call, the rotation that they make (None where nothing is turned),
    and the order of coordinates in which it is one."""

    positions: Any
    rotation: Rotation | None
    order: Tensor

    def of(self, call: Call) -> bool:
        """Whether a call has these position embeddings."""
        return same_values(self.positions, call.kwargs.get(POSITIONS))


@dataclass
class ProbedWeights:
    """What probing found for one call: per-head projections in float64, what happens to queries and
    keys after them, and the output projection.

    Attributes:
        w, b: of queries, keys, values. Shared keys and values are repeated, one per query head.
        w_o: (heads, d_v, D_out), or None.
        norm_q, norm_k: normalisations, or None. rotation: of the call's tokens, or None.
        order: of the coordinates of queries and keys, (d,), relative to the model's own.
        positions: the position embeddings of the call, which ``rotation`` belongs to.
    """

    w: Tensors
    b: tuple[Tensor | None, ...]
    w_o: Tensor | None
    norm_q: QKNorm | None = None
    norm_k: QKNorm | None = None
    rotation: Rotation | None = None
    order: Tensor | None = None
    positions: Any = None

    def belongs_to(self, call: Call) -> bool:
        """Whether another call of the layer has the same rotation."""
        return same_values(self.positions, call.kwargs.get(POSITIONS))

    @property
    def turns(self) -> Turns | None:
        """What its position embeddings do, where it has some."""
        return None if self.order is None else Turns(self.positions, self.rotation, self.order)


def probe(call: Call, known: Iterable[Turns] = ()) -> ProbedWeights:
    """What a layer makes of its tokens.

    Args:
        call: of the layer. known: what position embeddings do in other layers; taken over where
            they do the same to this layer's vectors.

    Raises:
        CaptureError: queries and keys are normalised, or turned by their positions, in a way that
            is not known here; a mask, bias or sink depends on the tokens; or the output projection
            is not one.
    """
    layer = ProbedLayer(call)
    layer.refuse_what_depends_on_tokens()
    found = read_normalisations(call, layer.stubs, layer.projections)
    x = hidden_states(call)
    width = x.shape[-1]
    rows = torch.cat(
        [torch.zeros(1, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)]
    ).to(x.device)
    parts = [
        [y[: len(piece)] for y in layer.projections(_fill(piece, x))]
        for piece in rows.split(x.shape[0] * x.shape[1])
    ]
    maps = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]  # (D + 1, H or H_kv, d) each
    w = [(y[1:] - y[0]).transpose(0, 1).contiguous() for y in maps]
    b = [y[0] if bool((y[0] != 0).any()) else None for y in maps]
    norms = [
        _over_all_heads(norm, w[i], b[i]) if norm and together else norm
        for i, (norm, together) in enumerate(found)
    ]
    rotation = order = None
    if call.kwargs.get(POSITIONS) is not None:
        rotation, order = layer.rotation(
            (turns.rotation, turns.order) for turns in known if turns.of(call)
        )
    heads = call.q.shape[1]

    def one_per_head(t: Tensor | None, side: int) -> Tensor | None:
        t = t if t is None or order is None or side == 2 else t[..., order]
        return None if t is None else t.repeat_interleave(heads // t.shape[0], 0)

    def every(norm: QKNorm | None, side: int) -> QKNorm | None:
        if norm is None:
            return None
        gain = one_per_head(norm.gain, side)
        assert gain is not None
        return replace(norm, gain=gain, bias=one_per_head(norm.bias, side))

    return ProbedWeights(
        tuple(t for i in range(3) if (t := one_per_head(w[i], i)) is not None),
        tuple(one_per_head(b[i], i) for i in range(3)),
        _probe_output(call),
        norm_q=every(norms[0], 0),
        norm_k=every(norms[1], 1),
        rotation=rotation,
        order=order,
        positions=call.kwargs.get(POSITIONS),
    )


def _over_all_heads(norm: QKNorm, w: Tensor, b: Tensor | None) -> QKNorm:
    """The normalisation of all heads' vectors together, whose projection is (heads, D, d) head by
    head."""
    return replace(norm, over=(w.transpose(0, 1).flatten(1), None if b is None else b.flatten()))


def _probe_output(call: Call) -> Tensor | None:
    """Slices of the projection that consumes the flattened heads, (heads, d_v, D_out)."""
    if call.consumer is None:
        return None
    heads, d_v = call.q.shape[1], call.v.shape[-1]
    projection = plain_copy(call.consumer).to(call.q.device).double()
    device = call.q.device
    eye = torch.eye(heads * d_v, dtype=torch.float64, device=device)
    zero = projection(torch.zeros_like(eye[:1]))
    w_o: Tensor = projection(eye) - zero
    flat = call.out.flatten(2).flatten(0, 1)
    flat = (
        flat[:: -(-len(flat) // CHECKED)].double().nan_to_num()
    )  # rows of padding may be undefined
    own, mine, size = projection(flat) - zero, flat @ w_o, flat.abs() @ w_o.abs()
    if not float((own - mine).abs().amax()) <= CAPTURE_TOLERANCE * float(
        torch.maximum(own.abs().amax(), 1e-3 * size.amax())
    ):
        raise CaptureError(
            f"layer {call.name}: the output projection ({type(call.consumer).__name__}) is not "
            "an affine map, which is not supported"
        )
    return w_o.view(heads, d_v, -1)


def _fill(rows: Tensor, like: Tensor) -> Tensor:
    """``rows`` in the first token slots of a zero tensor shaped like ``like``."""
    slots = torch.zeros(
        like.shape[0] * like.shape[1], rows.shape[1], dtype=rows.dtype, device=rows.device
    )
    slots[: len(rows)] = rows
    return slots.view(*like.shape[:2], -1)
