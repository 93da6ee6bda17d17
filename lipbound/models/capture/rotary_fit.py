"""Reading a rotary position embedding off pairs of vectors before and after it, whatever the order
of its coordinates."""

import torch
from torch import Tensor

from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError

NOISE = 1e-9
"""Entries of the fitted maps, relative to 1, below which (or ten times the misfit) there is
nothing."""
ROTATION_TOLERANCE = 1e-5
"""Largest difference between a fitted map and a rotation; models that turn in float32 leave 1e-7.
"""


def find_rotation(before: Tensor, after: Tensor) -> tuple[Rotation | None, Tensor]:
    """The rotation that takes some vectors of every token to others, and the order of coordinates
    in which it is one.

    Args:
        before, after: (vectors, N, d), float64, at least d vectors in general position.

    Returns:
        The rotation (None if nothing is turned) of vectors whose coordinates are put in the order
        returned, (d,): first those of each pair, then their partners, then the rest.

    Raises:
        CaptureError: the vectors are not taken to each other by a linear map for each token, or not
            by a rotation of pairs of coordinates.
    """
    y, z = before.transpose(0, 1), after.transpose(0, 1)  # (N, vectors, d)
    driver = (
        "gelsd" if y.device.type == "cpu" else "gels"
    )  # the default one rounds as its workspace happens to lie in memory
    maps = torch.linalg.lstsq(y, z, driver=driver).solution.mT  # z = R y
    misfit = float((y @ maps.mT - z).abs().amax() / z.abs().amax().clamp_min(1e-300))
    if not misfit <= ROTATION_TOLERANCE:
        raise CaptureError(
            "positions act on queries and keys in another way than by a rotation of each token"
        )
    d = maps.shape[-1]
    diagonal = maps.diagonal(dim1=-2, dim2=-1)  # (N, d)
    others = (maps - torch.diag_embed(diagonal)).abs().amax(0)
    size, partner = others.max(-1)
    turned = size > max(NOISE, 10 * misfit)
    first = [a for a in range(d) if turned[a] and a < partner[a]]
    second = [int(partner[a]) for a in first]
    rest = [a for a in range(d) if a not in {*first, *second}]
    scaled = [
        a for a in rest if bool((diagonal[:, a] - 1).abs().amax() > ROTATION_TOLERANCE)
    ]  # not turned by any token here, but lengthened
    first, second = first + scaled[::2], second + scaled[1::2]
    rest = [a for a in rest if a not in scaled]
    order = torch.tensor(first + second + rest, device=maps.device)
    if len(first) != len(second) or len(set(order.tolist())) != d:
        raise CaptureError(
            "positions act on queries and keys by a linear map that is not a rotation of pairs "
            "of coordinates"
        )
    if not first:
        return None, order
    rotation = Rotation(maps[:, first, first].contiguous(), maps[:, second, first].contiguous())
    if not misses(rotation, order, before, after) <= 10 * ROTATION_TOLERANCE:
        raise CaptureError(
            "positions act on queries and keys by a linear map that is not a rotation of pairs "
            "of coordinates"
        )
    return rotation, order


def misses(rotation: Rotation | None, order: Tensor, before: Tensor, after: Tensor) -> float:
    """By how much a rotation, of coordinates in this order, does not take some vectors of every
    token, (vectors, N, d), to others; relative."""
    left, right = before[..., order], after[..., order]
    turned = left if rotation is None else rotation.turn(left)
    return float((turned - right).abs().amax() / right.abs().amax().clamp_min(1e-300))
