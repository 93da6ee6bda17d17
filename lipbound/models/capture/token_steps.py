"""Normalisations and rotations, read off a layer fed chosen tokens, or numbers that pass by.

A stub in the place of a normalisation of queries, keys or values does its linear part only; a
rotation is fitted to pairs of vectors before and after it, whatever the order of its coordinates.
Layer normalisation around an attention layer is found by what passes through the model.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.layer import Attention
from lipbound.attention.layer_norm import Normaliser, ResidualContext
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError
from lipbound.models.capture.rerun import relative_error
from lipbound.models.capture.seeing.call import Call, samples_first
from lipbound.models.offload import resident
from lipbound.models.other_libraries import changed

RESIDUAL_TOLERANCE = 1e-4
"""Largest relative difference between what passes through the model and what is rebuilt."""


class Seen(NamedTuple):
    """A module with one vector of weights, what it was given and what it returned."""

    module: nn.Module
    x: Tensor
    out: Tensor


@contextmanager
def watching(model: nn.Module | None) -> Iterator[list[Seen]]:
    """Yield a list of what passes through modules that may be normalisations; empty for None."""
    seen: list[Seen] = []

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == output.shape:
            seen.append(Seen(module, x.detach(), output.detach()))

    with ExitStack() as hooks:
        for module in () if model is None else model.modules():
            if isinstance(w := getattr(module, "weight", None), Tensor) and w.ndim == 1:
                hooks.enter_context(module.register_forward_hook(after))
        yield seen


def surroundings(att: Attention, seen: Sequence[Seen]) -> ResidualContext:
    """Return what stands around a layer, each part checked against the numbers of the model.

    Parts are None where they could not be found.
    """
    shape, (samples, n) = att.x.shape, att.x.shape[:2]

    def laid(t: Tensor) -> Tensor:
        return samples_first(t, samples, n).reshape(shape)

    like = [s for s in seen if s.x.numel() == att.x.numel() and s.x.shape[-1] == shape[-1]]
    seen = [Seen(s.module, laid(s.x), laid(s.out)) for s in like]
    x = _real(att.x, att)
    feeding = (s for s in seen if relative_error(_real(s.out, att), x) <= RESIDUAL_TOLERANCE)
    fed_by = next(filter(None, map(normaliser, feeding)), None)
    if att.w_o is None or att.w_o.shape[2] != shape[2]:
        return ResidualContext(fed_by)
    out = torch.einsum("shnv,hvo->sno", att.out, att.w_o)
    att.cache.drop("p", "out")
    streams = {"post": att.x} | ({} if fed_by is None else {"pre": fed_by.x})
    for residual, stream in streams.items():
        for s in seen:
            if _constant(s.x - stream - out, out, att):
                after = normaliser(s) if residual == "post" else None
                return ResidualContext(fed_by, residual, after)
    return ResidualContext(fed_by)


def _real(t: Tensor, att: Attention) -> Tensor:
    """Return the tokens that are not padding, (n, D)."""
    return t.flatten(0, 1) if att.valid is None else t[att.valid]


def _constant(difference: Tensor, out: Tensor, att: Attention) -> bool:
    """Return whether a difference is the same for every token, as an output bias is."""
    rest, size = _real(difference, att), float(_real(out, att).abs().amax())
    if len(rest) < 2:
        return False  # one token shows nothing
    return float((rest - rest[:1]).abs().amax()) <= RESIDUAL_TOLERANCE * size


def normaliser(s: Seen) -> Normaliser | None:
    """Return LayerNorm, or RMSNorm with weights w or 1 + w, whichever rebuilds the output."""
    with resident(s.module):
        weight, bias = s.module.weight, getattr(s.module, "bias", None)
    assert isinstance(weight, Tensor)
    weight, bias = weight.to(s.x.device), None if bias is None else bias.to(s.x.device).detach()
    eps = eps_of(s.module, s.x.dtype)
    for centred, shift in ((True, 0.0), (False, 0.0), (False, 1.0)):
        norm = Normaliser(s.x, (weight + shift).detach(), bias, eps=eps, centred=centred)
        if relative_error(norm.out, s.out) <= RESIDUAL_TOLERANCE:
            return norm
    return None


def eps_of(norm: nn.Module, dtype: torch.dtype) -> float:
    """Return the number that a normalisation, or one inside it, adds under the root.

    It is torch's own default, which depends on the dtype, where an RMSNorm has None.
    """
    for part in norm.modules():
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(part, name, None)
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                return float(value)
    own = any(isinstance(part, nn.RMSNorm) for part in norm.modules())
    return torch.finfo(dtype).eps if own else 0.0


NOISE = 1e-9
"""Size of an entry of a fitted map, or ten times the error of the fit, that counts as zero."""
ROTATION_TOLERANCE = 1e-5
"""Largest difference of a fitted map and a rotation; models that turn in float32 leave 1e-7."""
CENTRED = 1e-5
"""Largest relative change of a centring normalisation when all entries are moved alike."""

Map = Callable[[Tensor], Tensor]
Act = Callable[[Tensor, Map], Tensor]
"""What a stub makes of a vector, given the normalisation that it stands for."""
Project = Callable[[Tensor], tuple[Tensor, ...]]
"""A function that makes q, k, v of tokens."""


class NormStub(nn.Module):
    """A stand-in for a normalisation that does its linear part only, or what ``act`` does.

    The linear part takes the mean away if the normalisation does, and multiplies by its gains where
    these are known.

    Attributes:
        act: takes a vector and the normalisation to what is returned; None to pass it through.
        given: what it was given last, (..., width), without mean if that is taken away.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.centred, self.width = norm, False, 0
        self.act: Act | None = None
        self.gain: Tensor | None = None
        self.given = torch.zeros(0)

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
        self.given = y - y.mean(-1, keepdim=True) if self.centred else y
        if self.act is not None:
            return self.act(y, lambda t: self.norm(t, *args, **kwargs))
        return self.given if self.gain is None else self.given * self.gain


class TokenNorm(NamedTuple):
    """A normalisation as it was read off a layer.

    Attributes:
        norm: as if a head's own vector were normalised, (heads or groups, d).
        together: whether all heads are normalised together.
        latent: what stands for it where queries, keys or values are projections of the normalised
            vector, whose projection `QKNorm.over` then is. Its gains are part of theirs.
        part: coordinates that are normalised, (d,) bool.
        constant: bias of the projection of the normalised vector, (groups, d).
    """

    norm: QKNorm
    together: bool = False
    latent: NormStub | None = None
    part: Tensor | None = None
    constant: Tensor | None = None


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
    call: Call, stubs: Sequence[NormStub], project: Project, sides: Collection[int]
) -> list[TokenNorm | None]:
    """Return those of queries, keys and values; None where there is none.

    Args:
        call: of the layer.
        stubs: what stands for the normalisations of a copy of the layer.
        project: q, k, v, each (samples N, heads, d), that the copy makes of tokens (samples, N, D).
        sides: which of them are made of these tokens, by number.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(call.x.shape, generator=generator, dtype=torch.float64).to(call.q.device)

    plain = project(x)
    touching: list[list[NormStub]] = [[], [], []]
    for stub in [s for s in stubs if s.width]:
        nothing = _acting(stub, _nothing, x, project)
        for side in sides:
            if not torch.equal(nothing[side], plain[side]):
                touching[side].append(stub)
    if any(len(found) > 1 for found in touching):
        raise call.unsupported("normalises its queries, keys or values twice")
    sides_of = enumerate(touching)
    return [_read(call, one[0], side, x, project) if one else None for side, one in sides_of]


def _nothing(y: Tensor, norm: Map) -> Tensor:
    return torch.zeros_like(y)


def _acting(stub: NormStub, act: Act | None, x: Tensor, project: Project) -> tuple[Tensor, ...]:
    """Return q, k, v of tokens where a stub acts in some way."""
    with changed("act", act, stub):
        return project(x)


def _read(call: Call, stub: NormStub, side: int, x: Tensor, project: Project) -> TokenNorm:
    """Return what a stub of queries (side 0), keys (1) or values (2) stands for."""

    def seen(act: Act | None) -> Tensor:
        return _acting(stub, act, x, project)[side]  # (samples N, heads, d)

    def normalised(vector: Tensor) -> Tensor:
        return seen(lambda y, norm: norm(vector.expand_as(y).contiguous()))[0]

    own, eps = _pattern(stub.width).to(x), eps_of(stub.norm, call.q.dtype)
    pattern = seen(lambda y, norm: own.expand_as(y).contiguous())[0]
    heads, d = pattern.shape
    direct = stub.width == d
    if stub.width == heads * d and not direct:  # in any order
        off = pattern.flatten().sort().values - own.sort().values
        direct = bool(off.abs().amax() <= NOISE)
    if direct:
        made = map(normalised, (own, -own, own + 1))
        gain, shift, stub.centred = _gain_and_bias(pattern, *made, eps=eps)
        norm = QKNorm(gain, shift if bool((shift != 0).any()) else None, eps)
        return TokenNorm(norm, together=stub.width != d)
    if stub.given.numel() != stub.width * x[..., 0].numel():
        raise call.unsupported("normalises its queries, keys or values otherwise than by tokens")
    made = map(stub.norm, (own, -own, own + 1))
    stub.gain, bias, stub.centred = _gain_and_bias(own, *made, eps=eps)
    nothing, plain, shift = seen(_nothing), seen(None), seen(lambda y, _: bias.expand_as(y))[0]
    part = (plain != nothing).any(0).any(0)
    if not bool((nothing[1:, :, part] == nothing[:1, :, part]).all()):
        raise call.unsupported("adds other vectors to a normalised one for its queries or keys")
    shift, constant = (t.where(part, 0.0) for t in (shift, nothing[0]))
    left = shift if bool((shift != 0).any()) else None
    return TokenNorm(QKNorm(torch.ones_like(shift), left, eps), False, stub, part, constant)


def _gain_and_bias(
    pattern: Tensor, plus: Tensor, minus: Tensor, shifted: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, bool]:
    """Return gains and biases of a normalisation, and whether it takes the mean away.

    Args:
        pattern: a vector of mean zero and mean square 1.
        plus, minus, shifted: what is made of it, of its negative, and of it plus one.
        eps: under the root.
    """
    centred = relative_error(shifted, plus) <= CENTRED
    return (plus - minus) / 2 / pattern * (1 + eps) ** 0.5, (plus + minus) / 2, centred


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
    if not (misfit := relative_error(y @ maps.mT, z)) <= ROTATION_TOLERANCE:
        raise CaptureError("positions act on queries and keys otherwise than by rotations")
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
            "positions act on queries and keys by a linear map that rotates no pairs of coordinates"
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
    return relative_error(left if rotation is None else rotation.turn(left), right)
