"""The gate and the projection slices behind the outputs of heads, read off a layer."""

import torch
from torch import Tensor, nn

from lipbound.attention.variants.gate import Gate
from lipbound.errors import CaptureError
from lipbound.models.capture.rerun import ModuleCopy, Stopped, affine, on_units
from lipbound.models.capture.seeing.call import INTERFACE, Call
from lipbound.models.capture.seeing.follower import Follower, Heads
from lipbound.models.capture.seeing.interface import RAISED
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line

CAPTURE_TOLERANCE = 1e-4
"""Largest relative error of a rebuilt tensor.

Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude.
"""
CHECKED = 64
"""Number of recorded outputs of all heads that tell whether their projection is affine."""


def probe_output(call: Call, projection: nn.Module | None, heads: Tensor) -> Tensor | None:
    """Return slices of the projection of the flattened heads, (heads, d_v, D_out).

    Args:
        call: of the layer.
        projection: the module that projects, or None.
        heads: outputs of heads, (..., heads, d_v).

    Raises:
        CaptureError: it is not affine.
    """
    if projection is None:
        return None
    count, d_v, device = *heads.shape[-2:], heads.device
    copy = plain_copy(projection).to(device).double()
    eye = torch.eye(count * d_v, dtype=torch.float64, device=device)
    named = f"layer {call.name}: the output projection ({type(projection).__name__})"
    try:
        zero = copy(torch.zeros_like(eye[:1]))
        w_o: Tensor = copy(eye) - zero
    except RAISED as error:
        raise CaptureError(f"{named} cannot be run by itself ({first_line(error)})") from error
    flat = heads.reshape(-1, count * d_v)
    flat = flat[:: -(-len(flat) // CHECKED)].double().nan_to_num()  # padding may be undefined
    own, mine, size = copy(flat) - zero, flat @ w_o, flat.abs() @ w_o.abs()
    limit = CAPTURE_TOLERANCE * float(torch.maximum(own.abs().amax(), 1e-3 * size.amax()))
    if not float((own - mine).abs().amax()) <= limit:
        raise CaptureError(f"{named} is not an affine map, which is not supported")
    return w_o.view(count, d_v, -1)


class _ConstantHeads(Follower):
    """Lets attention return a constant, and stops where outputs of heads are projected."""

    def __init__(self, call: Call, constant: float):
        super().__init__()
        self._outputs = torch.full_like(call.out, constant, dtype=torch.float64)

    def asked(self, heads: Heads) -> Tensor:
        return self._outputs if heads.way == INTERFACE else self._outputs.transpose(-3, -2)

    def projected(self, x: Tensor, heads: Heads) -> None:
        raise Stopped(x.reshape(self._outputs.shape))


def probe_gate(call: Call) -> Gate | None:
    """Return the gate of a call's head outputs, float64; None where there is none.

    Raises:
        CaptureError: what stands between attention and its projection is no gate: sigmoids of an
            affine map of the output's own token.
    """
    if not call.gated or call.projected is None:
        return None
    layer = ModuleCopy(call.run, call)

    def logits(tokens: Tensor) -> list[Tensor]:
        ends = [layer.with_tokens(_ConstantHeads(call, size), tokens) for size in (1.0, 2.0)]
        if not all(isinstance(end, Stopped) for end in ends):
            raise call.unsupported(call.changed)
        one, two = (end.args[0] for end in ends)
        off = float((two - 2 * one).abs().amax())
        if not (bool((one > 0).all() and (one < 1).all()) and off <= CAPTURE_TOLERANCE):
            raise call.unsupported(call.changed)
        return [torch.logit(one).flatten(0, 1)]

    w, b = affine(on_units(call, logits)[0])
    gate = Gate(w.transpose(0, 1).contiguous(), b)
    made = torch.sigmoid(gate.logits(call.x)).transpose(1, 2) * call.out.double()
    own = call.projected.reshape(call.out.shape).double()
    size, off = own.nan_to_num().abs().amax(), (made - own).nan_to_num().abs().amax()
    if not bool(off <= CAPTURE_TOLERANCE * size):
        raise call.unsupported(call.changed)
    return gate
