"""Slices of the output projection of heads, read off its module."""

import torch
from torch import Tensor, nn

from lipbound.errors import CaptureError
from lipbound.models.capture.seeing.call import Call
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
    try:
        zero = copy(torch.zeros_like(eye[:1]))
        w_o: Tensor = copy(eye) - zero
    except RAISED as error:
        raise CaptureError(
            f"layer {call.name}: the output projection ({type(projection).__name__}) cannot be run "
            f"by itself ({first_line(error)})"
        ) from error
    flat = heads.reshape(-1, count * d_v)
    flat = flat[:: -(-len(flat) // CHECKED)].double().nan_to_num()  # padding may be undefined
    own, mine, size = copy(flat) - zero, flat @ w_o, flat.abs() @ w_o.abs()
    limit = CAPTURE_TOLERANCE * float(torch.maximum(own.abs().amax(), 1e-3 * size.amax()))
    if not float((own - mine).abs().amax()) <= limit:
        raise CaptureError(
            f"layer {call.name}: the output projection ({type(projection).__name__}) is not "
            "an affine map, which is not supported"
        )
    return w_o.view(count, d_v, -1)
