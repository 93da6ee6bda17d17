"""Normalisations and rotations of queries and keys, read off a layer that is fed chosen tokens.

A stub in a normalisation's place does its linear part only; a rotation is fitted to pairs of
vectors before and after it, whatever the order of its coordinates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError
from lipbound.models.capture.residual_detection import eps_of
from lipbound.models.capture.seeing.call import Call

NOISE = 1e-9
"""Entries of the fitted maps, relative to 1, up to which (or ten misfits) they are zero."""
ROTATION_TOLERANCE = 1e-5
"""Largest difference of a fitted map and a rotation; models that turn in float32 leave 1e-7."""
CENTRED = 1e-5
"""Largest relative change of a centring normalisation when all entries are moved alike."""

Project = Callable[[Tensor], tuple[Tensor, ...]]
"""A function that makes q, k, v of tokens."""


class NormStub(nn.Module):
    """A stand-in for a normalisation, which does what ``mode`` says with it.

    "linear": passes vectors through, without their mean if the normalisation takes it away.
    "nothing": zero. "pattern": a fixed vector of mean zero and mean square 1. "plus", "minus",
    "shifted": what the normalisation makes of the fixed vector, of its negative, of it plus one.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.mode, self.centred, self.width = norm, "linear", False, 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(self._unknown(f"the layer itself reads its {name}")) from None

    def _unknown(self, why: str) -> str:
        return f"its normalisation {type(self.norm).__name__} is of an unknown make: {why}"

    def forward(self, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        others = (*args, *kwargs.values())
        if not isinstance(y, Tensor) or any(isinstance(one, Tensor) for one in others):
            raise TypeError(self._unknown("it takes more than one tensor"))
        self.width = y.shape[-1]
        if self.mode == "linear":
            return y - y.mean(-1, keepdim=True) if self.centred else y
        if self.mode == "nothing":
            return torch.zeros_like(y)
        vector = _pattern(y.shape[-1]).to(y).expand_as(y).contiguous()
        if self.mode == "pattern":
            return vector
        given = {"plus": vector, "minus": -vector, "shifted": vector + 1}[self.mode]
        out: Tensor = self.norm(given, *args, **kwargs)
        return out


def stub_norms(owner: nn.Module) -> list[NormStub]:
    """Return the stubs that are put in the place of every outermost normalisation of a module."""
    stubs: list[NormStub] = []
    replaced: list[str] = []
    for name, module in list(owner.named_modules()):
        inside = any(name.startswith(done + ".") for done in replaced)
        if name and not inside and "norm" in type(module).__name__.lower():
            replaced.append(name)
            parent, _, last = name.rpartition(".")
            stubs.append(NormStub(module))
            setattr(owner.get_submodule(parent), last, stubs[-1])
    return stubs


def read_normalisations(
    call: Call, stubs: Sequence[NormStub], project: Project
) -> list[tuple[QKNorm | None, bool]]:
    """Return those of queries and of keys, as if a head's own vector were normalised.

    Args:
        call: of the layer.
        stubs: what stands for the normalisations of a copy of the layer; left in the mode "linear".
        project: q, k, v, each (samples N, heads, d), that the copy makes of tokens (samples, N, D).

    Returns:
        Each with whether all heads are normalised together; None where there is none.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(call.x.shape, generator=generator, dtype=torch.float64).to(call.q.device)
    plain = project(x)
    touching: list[list[NormStub]] = [[], [], []]
    for stub in [s for s in stubs if s.width]:
        stub.mode = "nothing"
        for side, (a, b) in enumerate(zip(project(x), plain, strict=True)):
            if not torch.equal(a, b):
                touching[side].append(stub)
        stub.mode = "linear"
    if touching[2]:
        heads, d_v = plain[2].shape[-2:]
        of_heads = touching[2][0].width in (d_v, heads * d_v)
        latent = "makes its values of a normalised vector (latent attention)"
        raise call.unsupported("normalises its values" if of_heads else latent)
    if any(len(found) > 1 for found in touching):
        raise call.unsupported("normalises its queries or keys twice")
    return [
        _read(call, found[0], side, x, project) if found else (None, False)
        for side, found in enumerate(touching[:2])
    ]


def _read(
    call: Call, stub: NormStub, side: int, x: Tensor, project: Project
) -> tuple[QKNorm, bool]:
    """Return the normalisation that a stub of queries (side 0) or keys (side 1) stands for."""

    def seen(mode: str) -> Tensor:
        stub.mode = mode
        return project(x)[side][0]  # (heads, d) of one token

    pattern, plus, minus, shifted = (seen(mode) for mode in ("pattern", "plus", "minus", "shifted"))
    heads, d = pattern.shape
    stub.centred = bool((shifted - plus).abs().amax() <= CENTRED * plus.abs().amax())
    if stub.width not in (d, heads * d):
        raise call.unsupported(
            "makes its queries or keys of a normalised vector of another width (latent attention)"
        )
    eps = eps_of(stub.norm, call.q.dtype)
    bias = (plus + minus) / 2
    stub.mode = "linear"
    gain = (plus - minus) / 2 / pattern * (1 + eps) ** 0.5
    return QKNorm(gain, bias if bool((bias != 0).any()) else None, eps), stub.width != d


def _pattern(width: int) -> Tensor:
    """Return a vector without zeros, of mean zero and mean square 1 (for a width of at least 2)."""
    vector = torch.ones(width, dtype=torch.float64)
    vector[1::2] = -1
    if width % 2 and width > 1:
        vector[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 2**0.5
    return vector


def find_rotation(before: Tensor, after: Tensor) -> tuple[Rotation | None, Tensor]:
    """Return the rotation of each token that takes vectors to others, and its coordinates' order.

    Args:
        before: (vectors, N, d), float64, at least d vectors in general position.
        after: (vectors, N, d), float64.

    Returns:
        The rotation (None if nothing is turned) of vectors whose coordinates are put in the order
        returned, (d,): first those of each pair, then their partners, then the rest.

    Raises:
        CaptureError: the vectors are not taken to each other by a linear map for each token, or not
            by a rotation of pairs of coordinates.
    """
    y, z = before.transpose(0, 1), after.transpose(0, 1)  # (N, vectors, d)
    # the default driver rounds as its workspace happens to lie in memory
    driver = "gelsd" if y.device.type == "cpu" else "gels"
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
    # coordinates that no token here turns, but that are lengthened
    scaled = (diagonal - 1).abs().amax(0) > ROTATION_TOLERANCE
    rest = [a for a in range(d) if a not in {*first, *second}]
    longer = [a for a in rest if scaled[a]]
    first, second = first + longer[::2], second + longer[1::2]
    rest = [a for a in rest if a not in longer]
    order = torch.tensor(first + second + rest, device=maps.device)
    rotation = None
    fits = len(first) == len(second) and len(set(order.tolist())) == d
    if fits and first:
        rotation = Rotation(maps[:, first, first].contiguous(), maps[:, second, first].contiguous())
        fits = misses(rotation, order, before, after) <= 10 * ROTATION_TOLERANCE
    if not fits:
        raise CaptureError(
            "positions act on queries and keys by a linear map that is not a rotation of pairs "
            "of coordinates"
        )
    return rotation, order


def misses(rotation: Rotation | None, order: Tensor, before: Tensor, after: Tensor) -> float:
    """Return how far a rotation does not take vectors of every token to others, relative.

    Args:
        rotation: or None, where nothing is turned.
        order: of the coordinates that it turns, (d,).
        before: (vectors, N, d).
        after: (vectors, N, d).
    """
    left, right = before[..., order], after[..., order]
    turned = left if rotation is None else rotation.turn(left)
    return float((turned - right).abs().amax() / right.abs().amax().clamp_min(1e-300))
