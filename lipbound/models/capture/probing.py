"""Reading the projections of an attention layer, and the parts of its scores, off the layer itself.

It makes no difference what its weights are called and how they are stored: the layer is copied, fed
chosen tokens in float64, and stopped where it computes attention. Position embeddings are replaced
by those that turn nothing, and normalisations of queries, keys or values by stubs that do what they
do linearly, so that what remains is affine in the tokens. Both are read off separately: a rotation
is fitted to pairs of vectors before and after it, whatever the order of its coordinates. Scores are
products of queries and keys, and constants.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.errors import DifferentPositionsError
from lipbound.models.capture import rerun
from lipbound.models.capture.seeing.follower import BY_HAND
from lipbound.models.capture.seeing.recording import HIDDEN, Call
from lipbound.models.other_libraries import temporarily

_ADDED = ("mask", "position_bias")
"""What attention is handed that is added to scores."""
POSITIONS = "position_embeddings"
"""The argument in which transformers hands rotary embeddings to a layer."""

NOISE = 1e-9
"""Size of an entry of a fitted map, or ten times the error of the fit, that counts as zero."""
ROTATION_TOLERANCE = 1e-5
"""Largest difference of a fitted map and a rotation; models that turn in float32 leave 1e-7."""
CENTRED = 1e-5
"""Largest relative change of a centring normalisation when all entries are moved alike."""

Tensors = tuple[Tensor, ...]
Map = Callable[[Tensor], Tensor]
Act = Callable[[Tensor, Map], Tensor]
"""Stand-in for a normalisation: a function of a vector and of the normalisation itself."""


class Turns(NamedTuple):
    """Position embeddings of a call, and the rotation that they make.

    Attributes:
        positions: the embeddings as the layer is given them; None where it makes them itself, or is
            given them under another name.
        rotation: None where nothing is turned; relative to the first token, where ``positions`` is
            None.
        order: of the coordinates in which it is one, (d,).
    """

    positions: Any
    rotation: Rotation | None
    order: Tensor

    def undone(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Return vectors (rows, heads, d) as they were before tokens at some positions turned them.

        Args:
            vectors: turned.
            positions: (rows,).
        """
        if self.rotation is None or self.positions is not None:
            return vectors
        cos, sin = (t[positions, None] for t in (self.rotation.cos, self.rotation.sin))
        size = cos.square() + sin.square()
        found = torch.empty_like(vectors)
        found[..., self.order] = turned(vectors[..., self.order], cos / size, -sin / size)
        return found


@dataclass
class ProbedWeights:
    """Per-head projections of a layer in float64, and the steps that follow them.

    Attributes:
        made: these, as arguments of `lipbound.Attention`: ``w_q``, ``w_k``, ``w_v``, of which
            shared ones are repeated, their biases ``b_q``..., normalisations ``norm_q``...,
            ``w_o``, and the ``gate`` of head outputs.
        turns: what its position embeddings do, in whose order the coordinates of weights, biases
            and normalisations are; None where it has none.
        sums: whether what is added to scores is still to be read off (`read_scores`).
    """

    made: dict[str, Any]
    turns: Turns | None
    sums: bool

    def belongs_to(self, call: Call) -> bool:
        """Return whether another call of the layer has the same position embeddings."""
        mine = None if self.turns is None else self.turns.positions
        if self.turns is not None and mine is None:
            return False  # what turns its tokens is not known
        return rerun.same_values(mine, call.run.kwargs.get(POSITIONS))


class ProbedLayer(rerun.ModuleCopy):
    """A copy of the layer of a call, in float64, stopped where it computes attention.

    Attributes:
        stubs: what stands for the copy's normalisations.
    """

    def __init__(self, call: Call):
        self._positions = given = call.run.kwargs.get(POSITIONS)
        self._tables = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
        count = 1 if isinstance(given, Tensor) else 2 * isinstance(given, tuple | list)
        if given is not None and len(self._tables) != count:
            raise call.unsupported(f"is given positions of unknown make ({type(given).__name__})")
        # cosines 1 and sines 0, or complex numbers 1, turn nothing
        still = [*map(torch.ones_like, self._tables[:1]), *map(torch.zeros_like, self._tables[1:])]
        self._unturned: Any = still[0] if isinstance(given, Tensor) else tuple(still)
        super().__init__(call, call.run)
        self.stubs = stub_norms(self.module)

    def seen(self, tokens: Tensor, *, turned: bool = True) -> tuple[Tensors, dict[str, Any]]:
        """Return q, k, v of tokens, and what else attention is handed.

        Args:
            tokens: (samples, N, D), float64.
            turned: with the call's position embeddings.
        """
        named = {} if turned or self._positions is None else {POSITIONS: self._unturned}
        parts, form = self.with_tokens(tokens, rerun.QKV, **named)[1], self.call.form
        one = parts[0]
        if form is None:
            others = {"mask": one.mask, "scale": one.scale, **one.extras}
            return (one.left[0], one.right[0], one.v), others | {"scores": one.scores}
        forms = form.in_heads(parts)
        if not forms:
            raise self.call.unsupported("computes other attention when it is run by itself")
        name = "scores" if self.call.way == BY_HAND else "mask"
        return forms[:3], {name: forms[4], "scale": one.scale}

    def projections(self, tokens: Tensor, *, turned: bool = False) -> Tensors:
        """Return q, k, v of tokens.

        Args:
            tokens: (samples, N, D), float64.
            turned: with the call's position embeddings.

        Returns:
            Each (samples N, H or H_kv, d).
        """
        made = [t.transpose(1, 2).flatten(0, 1) for t in self.seen(tokens, turned=turned)[0]]
        if any(len(made["qkv".index(one)]) != tokens[..., 0].numel() for one in self.call.sides):
            raise self.call.unsupported("has queries, keys or values whose axes are not known")
        return tuple(made)

    def random(self, generator: torch.Generator) -> Tensor:
        """Return random tokens, (samples, N, D), float64."""
        x = torch.randn(self.call.x.shape, generator=generator, dtype=torch.float64)
        return x.to(self.call.q.device)

    def refuse_what_depends_on_tokens(self) -> bool:
        """Return whether masks or biases change with the tokens, and refuse what else does.

        Their derivative would be missed, which no forward pass shows.
        """
        if self.call.way == BY_HAND:
            return True
        generator = torch.Generator().manual_seed(1)
        first, second = (self.seen(self.random(generator))[1] for _ in range(2))
        changed = [name for name, t in first.items() if not rerun.same_values(t, second.get(name))]
        if other := [name.replace("_", " ") for name in changed if name not in _ADDED]:
            raise self.call.unsupported(f"computes its {other[0]} from its tokens")
        return bool(changed)

    def turns(self, known: Iterable[Turns] = ()) -> Turns | None:
        """Return the rotation of the call's tokens, read off random tokens before and after it.

        Of a layer that makes it itself it is relative to that of the first token, read off one
        token that stands at every position. None where there is none, or positions act in another
        way, which the check of rebuilt queries tells.

        Args:
            known: of other layers; the last that takes the ones to the others is taken over.

        Raises:
            DifferentPositionsError: they differ from sample to sample.
        """
        given, d, n = self._positions, self.call.q.shape[-1], self.call.x.shape[1]
        if any(t.ndim > 2 and not torch.equal(t, t[:1].expand_as(t)) for t in self._tables):
            what = "is given samples of different positions (pad on the right, or give one by one)"
            raise self.call.unsupported(what, DifferentPositionsError)
        generator = torch.Generator().manual_seed(0 if given is not None else 4)
        pairs: list[tuple[Tensor, Tensor]] = []  # of (heads, N, d), before and after
        # vectors without their mean do not span the space
        with temporarily("act", lambda vectors, norm: vectors, *self.stubs):
            while sum(len(after) for _, after in pairs) < d + 4:
                x = self.random(generator)
                x = x[:, :1].expand(x.shape).contiguous() if given is None else x
                after = torch.cat([t.flatten(0, 1) for t in self.seen(x)[0][:2]])
                before = after[:, :1].expand(after.shape)
                if given is not None:
                    before = torch.cat([t.flatten(0, 1) for t in self.seen(x, turned=False)[0][:2]])
                # what turns tokens turns random ones
                elif not (pairs or rerun.relative_error(before, after) > ROTATION_TOLERANCE):
                    return None
                pairs.append((before, after))
        y, z = (torch.cat(some) for some in zip(*pairs, strict=True))
        for turns in reversed([*known]):
            fits = rerun.same_values(turns.positions, given) and len(turns.order) == d
            fits = fits and (turns.rotation is None or turns.rotation.tokens == n)
            if fits and misses(turns.rotation, turns.order, y, z) <= ROTATION_TOLERANCE:
                return turns._replace(positions=given)
        return find_rotation(given, y, z)


def probe(call: Call, known: Iterable[Turns] = ()) -> ProbedWeights:
    """Return what a layer makes of its tokens.

    It is refused where queries and keys are normalised, or turned by their positions, in a way that
    is not known here, or a mask, bias or sink depends on the tokens.

    Args:
        call: of the layer.
        known: what position embeddings do in other layers; taken over where they do the same to
            this layer's vectors.
    """
    layer = ProbedLayer(call)
    sums = layer.refuse_what_depends_on_tokens()
    sides = ["qkv".index(side) for side in call.sides]
    found = read_normalisations(layer, sides)
    (samples, n, width), heads = call.x.shape, call.q.shape[1]
    latents = [one.latent for one in found if one is not None and one.latent is not None]

    turns = layer.turns(known) if len(sides) == 3 else None

    def made(tokens: Tensor) -> list[Tensor]:
        vectors = layer.projections(tokens, turned=turns is None)
        return [*vectors, *(stub.given.reshape(samples * n, -1) for stub in latents)]

    # (D + 1, H or H_kv, d) of q, k, v, (D + 1, n) of latent vectors
    read = rerun.on_units(torch.ones_like(call.x[..., 0]), width, made)
    over = {id(stub): rerun.affine(t) for stub, t in zip(latents, read[3:], strict=True)}
    other = [t.new_zeros(width + 1, *t.shape[1:]) for t in read[:3]]  # of another stream
    maps = [read[side] if side in sides else other[side] for side in range(3)]
    positions = torch.arange(width + 1, device=call.x.device) % n
    if turns is not None:
        maps[:2] = [turns.undone(t, positions) for t in maps[:2]]

    def each_head(t: Tensor, side: int) -> Tensor:
        t = t if turns is None or side == 2 else t[..., turns.order]
        return t.repeat_interleave(heads // t.shape[0], 0)

    def norm(side: int, w: Tensor, b: Tensor | None) -> QKNorm | None:
        one = found[side]
        if one is None:
            return None
        read, part = one.norm, one.part
        if one.together:  # the vectors of all heads, whose projection is (heads, D, d) head by head
            whole = w.transpose(0, 1).flatten(1), None if b is None else b.flatten()
            read = replace(read, over=whole)
        if one.latent is not None:
            part = None if part is None or bool(part.all()) else each_head(part[None], side)[0]
            read = replace(read, over=over[id(one.latent)], part=part)
        bias = None if read.bias is None else each_head(read.bias, side)
        return replace(read, gain=each_head(read.gain, side), bias=bias)

    own: dict[str, Any] = {}
    for side, (name, one) in enumerate(zip("qkv", found, strict=True)):
        w, b = rerun.affine(maps[side])
        w = w.transpose(0, 1).contiguous()
        if one is not None and one.constant is not None and b is not None:
            b = b - one.constant
        own |= {f"w_{name}": each_head(w, side), f"norm_{name}": norm(side, w, b)}
        own[f"b_{name}"] = None if b is None else each_head(b, side)
    own |= {"w_o": rerun.probe_output(call, call.out), "gate": rerun.probe_gate(call)}
    return ProbedWeights(own, turns, sums)


def read_scores(call: Call) -> None:
    """Read factor and mask of the scores of a call off its layer.

    Scores, or masks, may depend on its tokens: they are products of queries and keys times a
    factor, and what is added, (samples, heads, N, N) float64, or nothing.

    Raises:
        CaptureError: its scores are no such sum.
    """
    layer, g = ProbedLayer(call), torch.Generator().manual_seed(3)
    passes = [_scores(call, layer, layer.random(g)) for _ in range(2)]
    (products, scores), (others, second) = passes
    hidden = (scores <= HIDDEN) & (second <= HIDDEN)
    change = (scores - second).masked_fill(hidden, 0.0)
    of_products = (products - others).masked_fill(hidden, 0.0)
    size = change.abs().amax()
    # a softmax without sinks does not see what all scores of a row have in common
    commons = (False,) if "s_aux" in call.extras else (False, True)
    for common in commons:
        if common:
            change, of_products = (_less_common(t, hidden) for t in (change, of_products))
        factor = (change * of_products).sum() / of_products.square().sum()
        if bool((change - factor * of_products).abs().amax() <= ROTATION_TOLERANCE * size):
            break
    else:
        raise call.unsupported("adds other products of its tokens to its scores, or changes them")
    added = scores - factor * products
    if common:
        added = _less_common(added.masked_fill(hidden, 0.0), hidden)
    largest = scores[~hidden].abs().amax()
    added[(added.abs() <= NOISE * largest) & ~hidden] = 0
    added = added.masked_fill(hidden, torch.finfo(call.x.dtype).min)
    call.scale, call.mask = float(factor), added if bool((added != 0).any()) else None
    call.extras = {name: t for name, t in call.extras.items() if name != "position_bias"}


def _scores(call: Call, layer: ProbedLayer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return products of queries and keys, and scores, (samples, heads, N, N) each."""
    (q, k, _), others = layer.seen(tokens)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if call.way == BY_HAND:
        return q @ k.mT, others["scores"].reshape(*q.shape[:-1], k.shape[-2])
    scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    for name in _ADDED:
        if (added := others.get(name)) is not None:
            scores = scores + added[..., : k.shape[-2]]
    return q @ k.mT, scores


def _less_common(t: Tensor, hidden: Tensor) -> Tensor:
    """Subtract from each row its mean over keys that are not hidden; hidden entries of t are 0."""
    mean = t.sum(-1, keepdim=True) / (~hidden).sum(-1, keepdim=True).clamp_min(1)
    return (t - mean).masked_fill(hidden, 0.0)


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
        return f"its normalisation {type(self.norm).__name__} is of unknown make: {why}"

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
    stubs: dict[str, NormStub] = {}
    for name, module in list(owner.named_modules()):
        inside = any(name.startswith(outer + ".") for outer in stubs)
        if name and not inside and "norm" in type(module).__name__.lower():
            stubs[name], (parent, _, last) = NormStub(module), name.rpartition(".")
            setattr(owner.get_submodule(parent), last, stubs[name])
    return [*stubs.values()]


def read_normalisations(layer: ProbedLayer, sides: Collection[int]) -> list[TokenNorm | None]:
    """Return those of queries, keys and values of a layer; None where there is none.

    Args:
        layer: with stubs in their place.
        sides: which of the three are made of its tokens, by number.
    """
    x = layer.random(torch.Generator().manual_seed(0))
    plain = layer.projections(x)
    touching: list[list[NormStub]] = [[], [], []]
    for stub in [s for s in layer.stubs if s.width]:
        nothing = _acting(stub, _nothing, x, layer)
        for side in sides:
            if not torch.equal(nothing[side], plain[side]):
                touching[side].append(stub)
    if any(len(found) > 1 for found in touching):
        raise layer.call.unsupported("normalises its queries, keys or values twice")
    return [_read(layer, one[0], side, x) if one else None for side, one in enumerate(touching)]


def _nothing(y: Tensor, norm: Map) -> Tensor:
    return torch.zeros_like(y)


def _acting(stub: NormStub, act: Act | None, x: Tensor, layer: ProbedLayer) -> Tensors:
    """Return q, k, v of tokens where a stub acts in some way."""
    with temporarily("act", act, stub):
        return layer.projections(x)


def _read(layer: ProbedLayer, stub: NormStub, side: int, x: Tensor) -> TokenNorm:
    """Return what a stub of queries (side 0), keys (1) or values (2) stands for."""
    call = layer.call

    def seen(act: Act | None) -> Tensor:
        return _acting(stub, act, x, layer)[side]  # (samples N, heads, d)

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
    centred = rerun.relative_error(shifted, plus) <= CENTRED
    return (plus - minus) / 2 / pattern * (1 + eps) ** 0.5, (plus + minus) / 2, centred


def _pattern(width: int) -> Tensor:
    """Return a vector without zeros, of mean zero and mean square 1 (for a width of at least 2)."""
    vector = torch.ones(width, dtype=torch.float64)
    vector[1::2] = -1
    if width % 2 and width > 1:
        vector[-3:] = torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 2**0.5
    return vector


def find_rotation(positions: Any, before: Tensor, after: Tensor) -> Turns | None:
    """Return the rotation of each token that takes vectors to others, and its coordinates' order.

    Args:
        positions: as of `Turns`.
        before: (vectors, N, d), float64, at least d vectors in general position.
        after: (vectors, N, d), float64.

    Returns:
        The rotation (None if nothing is turned) of vectors whose coordinates are put in the order
        returned, (d,): first those of each pair, then their partners, then the rest. None where the
        vectors are not taken to each other by a linear map for each token, or not by a rotation of
        pairs of coordinates.
    """
    y, z = before.transpose(0, 1), after.transpose(0, 1)  # (N, vectors, d)
    # the default driver rounds as its workspace happens to lie in memory
    driver = "gelsd" if y.device.type == "cpu" else "gels"
    maps = torch.linalg.lstsq(y, z, driver=driver).solution.mT  # z = R y
    if not (misfit := rerun.relative_error(y @ maps.mT, z)) <= ROTATION_TOLERANCE:
        return None
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
    return Turns(positions, rotation, order) if fits else None


def misses(rotation: Rotation | None, order: Tensor, before: Tensor, after: Tensor) -> float:
    """Return how far a rotation does not take vectors of every token to others, relative.

    Args:
        rotation: or None, where nothing is turned.
        order: of the coordinates that it turns, (d,).
        before: (vectors, N, d).
        after: (vectors, N, d).
    """
    left, right = before[..., order], after[..., order]
    return rerun.relative_error(left if rotation is None else rotation.turn(left), right)


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
