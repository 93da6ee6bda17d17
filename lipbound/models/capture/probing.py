"""Reading the projections of an attention layer, and the parts of its scores, off the layer itself.

It makes no difference what its weights are called and how they are stored: the layer is copied, fed
chosen tokens in float64, and stopped where it computes attention. Position embeddings are replaced
by those that turn nothing, and normalisations of queries and keys by what they do linearly, so that
what remains is affine in the tokens; both are read off separately. Scores are products of queries
and keys, and constants.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.errors import CaptureError, DifferentPositionsError
from lipbound.models.capture import token_steps
from lipbound.models.capture.rerun import (
    QKV,
    ModuleCopy,
    affine,
    on_units,
    probe_gate,
    probe_output,
    same_values,
)
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, Call
from lipbound.models.capture.seeing.follower import in_heads
from lipbound.models.capture.token_steps import NOISE, ROTATION_TOLERANCE

ADDED = ("mask", "position_bias")
"""What attention is handed that is added to scores."""
POSITIONS = "position_embeddings"
"""The argument in which transformers hands rotary embeddings to a layer."""

Tensors = tuple[Tensor, ...]


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
        w: of queries, keys, values, each (heads, D, d); shared ones are repeated, one a query head.
        b: biases of the same, each (heads, d) or None.
        w_o: output projection, (heads, d_v, D_out), or None.
        norms: normalisations of queries, keys and values, or None.
        gate: of head outputs, or None.
        turns: what its position embeddings do, in whose order the coordinates of ``w``, ``b`` and
            normalisations are; None where it has none.
        sums: whether what is added to scores is still to be read off
            (`lipbound.models.capture.probing`).
    """

    w: Tensors
    b: tuple[Tensor | None, ...]
    w_o: Tensor | None
    norms: tuple[QKNorm | None, ...]
    gate: Gate | None = None
    turns: Turns | None = None
    sums: bool = False

    def times(self, factor: Tensor) -> "ProbedWeights":
        """Return the weights that make queries longer by a factor for each head, (heads, 1, 1)."""

        def longer(t: Tensor | None) -> Any:
            return None if t is None else t * factor.view(-1, *[1] * (t.ndim - 1))

        (w, *others), (b, *biases), (norm, *norms) = self.w, self.b, self.norms
        if norm is not None:
            norm = replace(norm, gain=longer(norm.gain), bias=longer(norm.bias))
            return replace(self, norms=(norm, *norms))
        return replace(self, w=(longer(w), *others), b=(longer(b), *biases))

    def belongs_to(self, call: Call) -> bool:
        """Return whether another call of the layer has the same position embeddings."""
        mine = None if self.turns is None else self.turns.positions
        if self.turns is not None and mine is None:
            return False  # what turns its tokens is not known
        return same_values(mine, call.run.kwargs.get(POSITIONS))


class ProbedLayer(ModuleCopy):
    """A copy of the layer of a call, in float64, stopped where it computes attention.

    Attributes:
        stubs: what stands for the copy's normalisations.
    """

    def __init__(self, call: Call):
        given: Any = call.run.kwargs.get(POSITIONS)
        self._positions = given
        self._tables = () if given is None else (given,) if isinstance(given, Tensor) else given
        pair = isinstance(given, tuple | list) and len(given) == 2
        tensors = pair and all(isinstance(t, Tensor) for t in given)
        if not (given is None or isinstance(given, Tensor) or tensors):
            raise call.unsupported(
                f"is given positions of an unknown make ({type(given).__name__})"
            )
        super().__init__(call, call.run)
        self.stubs = token_steps.stub_norms(self.module)

    def seen(self, tokens: Tensor, *, turned: bool = True) -> tuple[Tensors, dict[str, Any]]:
        """Return q, k, v of tokens, and what else attention is handed.

        Args:
            tokens: (samples, N, D), float64.
            turned: with the call's position embeddings.
        """
        named = {}
        if not turned and self._positions is not None:
            named = {POSITIONS: _unturned(self._positions)}
        parts, form = self.with_tokens(tokens, QKV, **named)[1], self.call.form
        one = parts[0]
        if form is None:
            others = {"mask": one.mask, "scale": one.scale, **one.extras}
            return (one.q[0], one.k[0], one.v), others | {"scores": one.scores}
        forms = in_heads(parts, form)
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
        return tuple(t.transpose(1, 2).flatten(0, 1) for t in self.seen(tokens, turned=turned)[0])

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
        changed = [name for name, t in first.items() if not same_values(t, second.get(name))]
        for name in changed:
            if name not in ADDED:
                what = name.replace("_", " ")
                raise self.call.unsupported(f"computes its {what} from its tokens")
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
            raise self.call.unsupported(
                "is given samples with different positions (pad on the right, or give one by one)",
                DifferentPositionsError,
            )
        for stub in self.stubs:  # centred vectors do not span the space
            stub.act = lambda vectors, norm: vectors
        generator = torch.Generator().manual_seed(0 if given is not None else 4)
        pairs: list[tuple[Tensor, Tensor]] = []  # of (heads, N, d), before and after
        while sum(len(after) for _, after in pairs) < d + 4:
            x = self.random(generator)
            x = x[:, :1].expand(x.shape).contiguous() if given is None else x
            after = [t.flatten(0, 1) for t in self.seen(x)[0][:2]]
            before = [t[:, :1].expand(t.shape) for t in after]
            if given is not None:
                before = [t.flatten(0, 1) for t in self.seen(x, turned=False)[0][:2]]
            pairs += zip(before, after, strict=True)
        for stub in self.stubs:
            stub.act = None
        y, z = (torch.cat(some) for some in zip(*pairs, strict=True))
        moved = (z - y).abs().amax() > ROTATION_TOLERANCE * z.abs().amax()
        if given is None and not bool(moved):
            return None
        for turns in reversed([*known]):
            fits = same_values(turns.positions, given) and len(turns.order) == d
            fits = fits and (turns.rotation is None or turns.rotation.tokens == n)
            if fits and token_steps.misses(turns.rotation, turns.order, y, z) <= ROTATION_TOLERANCE:
                return turns._replace(positions=given)
        try:
            return Turns(given, *token_steps.find_rotation(y, z))
        except CaptureError:
            return None

    def refuse_added_positions(self) -> None:
        """Refuse layers in which the position changes what is made of a token that is zero."""
        some = self.random(torch.Generator().manual_seed(5))
        made, other = (self.projections(t, turned=True) for t in (torch.zeros_like(some), some))
        for side in ("qkv".index(name) for name in self.call.sides):
            if len(made[side]) != some[..., 0].numel():
                raise self.call.unsupported("has queries, keys or values whose axes are not known")
            moved = (made[side] - made[side][:1]).abs().amax()
            if bool(moved > ROTATION_TOLERANCE * other[side].abs().amax()):
                raise self.call.unsupported(
                    "makes other queries, keys or values of the same token at other positions (as "
                    "where positions are added to tokens)"
                )


def _unturned(positions: Any) -> Any:
    """Return position embeddings that turn nothing: cosines 1 and sines 0, or complex numbers 1."""
    if isinstance(positions, Tensor):
        return torch.ones_like(positions)
    cos, sin = positions
    return torch.ones_like(cos), torch.zeros_like(sin)


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
    found = token_steps.read_normalisations(call, layer.stubs, layer.projections, sides)
    (samples, n, width), heads = call.x.shape, call.q.shape[1]
    latents = [one.latent for one in found if one is not None and one.latent is not None]

    turns = layer.turns(known) if len(sides) == 3 else None
    if turns is None and not latents:
        layer.refuse_added_positions()

    def made(tokens: Tensor) -> list[Tensor]:
        vectors = layer.projections(tokens, turned=turns is None)
        return [*vectors, *(stub.given.reshape(samples * n, -1) for stub in latents)]

    read = on_units(call, made)  # (D + 1, H or H_kv, d) of q, k, v, (D + 1, n) of latent vectors
    over = {id(stub): affine(t) for stub, t in zip(latents, read[3:], strict=True)}
    maps = [  # those of another stream are zero
        t if side in sides else t.new_zeros(width + 1, *t.shape[1:])
        for side, t in enumerate(read[:3])
    ]
    rows = torch.arange(width + 1, device=call.x.device) % (samples * n)
    if turns is not None:
        maps[:2] = [turns.undone(t, rows % n) for t in maps[:2]]

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

    weights, biases, norms = [], [], []
    for side, one in enumerate(found):
        w, b = affine(maps[side])
        w = w.transpose(0, 1).contiguous()
        if one is not None and one.constant is not None and b is not None:
            b = b - one.constant
        norms.append(norm(side, w, b))
        weights.append(each_head(w, side))
        biases.append(None if b is None else each_head(b, side))
    w_o, gate = probe_output(call, call.out), probe_gate(call)
    return ProbedWeights(tuple(weights), tuple(biases), w_o, tuple(norms), gate, turns, sums)


def score_parts(call: Call) -> tuple[float | Tensor, Tensor | None]:
    """Return the parts of the scores of a layer, whose scores or masks may depend on its tokens.

    They are the factor of products of queries and keys, or one for each head, (heads, 1, 1); and
    what is added, (samples, heads, N, N) float64, or None.

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
    for common, axes in itertools.product(commons, ((0, 1, 2, 3), (0, 2, 3))):
        if common:
            change, of_products = (_less_common(t, hidden) for t in (change, of_products))
        factor = (change * of_products).sum(axes, keepdim=True)[0]
        factor = factor / of_products.square().sum(axes, keepdim=True)[0]
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
    scale = factor if len(factor) > 1 else float(factor)
    return scale, added if bool((added != 0).any()) else None


def _scores(call: Call, layer: ProbedLayer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return products of queries and keys, and scores, (samples, heads, N, N) each."""
    (q, k, _), others = layer.seen(tokens)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if call.way == BY_HAND:
        return q @ k.mT, others["scores"].reshape(*q.shape[:-1], k.shape[-2])
    scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    for name in ADDED:
        if (added := others.get(name)) is not None:
            scores = scores + added[..., : k.shape[-2]]
    return q @ k.mT, scores


def _less_common(t: Tensor, hidden: Tensor) -> Tensor:
    """Subtract from each row its mean over keys that are not hidden; hidden entries of t are 0."""
    mean = t.sum(-1, keepdim=True) / (~hidden).sum(-1, keepdim=True).clamp_min(1)
    return (t - mean).masked_fill(hidden, 0.0)
