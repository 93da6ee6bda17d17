"""Reading the projections of an attention layer off the layer itself.

It makes no difference what its weights are called and how they are stored: the layer is copied, fed
chosen tokens in float64, and stopped at the attention interface. Position embeddings are replaced
by those that turn nothing, and normalisations of queries and keys by what they do linearly, so that
what remains is affine in the tokens; both are read off separately.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.offsets import Offsets
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.errors import CaptureError, DifferentPositionsError, LipboundError
from lipbound.models.capture.gates import probe_gate
from lipbound.models.capture.output_projection import probe_output
from lipbound.models.capture.seeing.by_hand import Follower, HeadOutputs, in_heads
from lipbound.models.capture.seeing.call import BY_HAND, INTERFACE, Call
from lipbound.models.capture.seeing.fused import additive_mask, handling_fused
from lipbound.models.capture.seeing.interface import RAISED, handling
from lipbound.models.capture.seeing.without_casts import WithoutCasts
from lipbound.models.capture.token_inputs import filled, replaced, same_values
from lipbound.models.capture.token_steps import (
    ROTATION_TOLERANCE,
    find_rotation,
    misses,
    read_normalisations,
    stub_norms,
)
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line

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
        norm_q: normalisation of queries, or None.
        norm_k: normalisation of keys, or None.
        norm_v: normalisation of values, or None.
        gate: of head outputs, or None.
        turns: what its position embeddings do, in whose order the coordinates of ``w``, ``b`` and
            normalisations are; None where it has none.
        offsets: what positions add to queries and keys, where they do that.
        sums: whether what is added to scores is still to be read off
            (`lipbound.models.capture.scores`).
    """

    w: Tensors
    b: tuple[Tensor | None, ...]
    w_o: Tensor | None
    norm_q: QKNorm | None = None
    norm_k: QKNorm | None = None
    norm_v: QKNorm | None = None
    gate: Gate | None = None
    turns: Turns | None = None
    offsets: Offsets | None = None
    sums: bool = False

    def belongs_to(self, call: Call) -> bool:
        """Return whether another call of the layer has the same position embeddings."""
        mine = None if self.turns is None else self.turns.positions
        if self.offsets is not None:
            return False
        if self.turns is not None and mine is None:
            return False  # what turns its tokens is not known
        return same_values(mine, call.run.kwargs.get(POSITIONS))


class _Stopped(Exception):
    """The end of a probing pass at the interface, with q, k, v and what else was handed over."""

    def __init__(self, qkv: Tensors, others: dict[str, Any]):
        self.qkv, self.others = qkv, others


class Dependence(NamedTuple):
    """The dependence of queries, keys or values on tokens and positions.

    Attributes:
        on_tokens: the tokens of the layer.
        on_others: tokens other than their own.
        on_position: the position of their own.
    """

    on_tokens: bool
    on_others: bool
    on_position: bool


class ProbedLayer:
    """A copy of the layer of a call, in float64, stopped at the attention interface.

    Attributes:
        stubs: what stands for the copy's normalisations.
    """

    def __init__(self, call: Call):
        self._call, positions = call, call.run.kwargs.get(POSITIONS)
        known = positions is None or isinstance(positions, Tensor)
        if isinstance(positions, tuple | list) and len(positions) == 2:
            known = all(isinstance(t, Tensor) for t in positions)
        if not known:
            raise call.unsupported(
                f"is given position embeddings of an unknown make ({type(positions).__name__}; "
                "known are cosines and sines)"
            )
        self._owner = plain_copy(call.module).to(call.q.device).double()
        self.stubs = stub_norms(self._owner)

    def projections(self, tokens: Tensor, *, turned: bool = False) -> Tensors:
        """Return q, k, v of tokens.

        Args:
            tokens: (samples, N, D), float64.
            turned: with the call's position embeddings.

        Returns:
            Each (samples N, H or H_kv, d).
        """
        return tuple(t.transpose(1, 2).flatten(0, 1) for t in self._stop(tokens, turned).qkv)

    def _vectors(self, tokens: Tensor, *, turned: bool = False) -> list[Tensor]:
        """Return queries, and keys, of tokens (samples, N, D), each (samples heads, N, d)."""
        sides, shape = self.projections(tokens, turned=turned)[:2], tokens.shape[:2]
        return [t.unflatten(0, shape).transpose(1, 2).flatten(0, 1) for t in sides]

    def refuse_what_depends_on_tokens(self) -> bool:
        """Return whether masks or biases change with the tokens, and refuse what else does.

        Their derivative would be missed, which no forward pass shows.
        """
        generator = torch.Generator().manual_seed(1)
        if self._call.way == BY_HAND:
            return True
        first, second = (self._stop(self.random(generator), True).others for _ in range(2))
        changed = [name for name, t in first.items() if not same_values(t, second.get(name))]
        for name in changed:
            if name not in ADDED:
                raise self._call.unsupported(
                    f"computes its {name.replace('_', ' ')} from its tokens"
                )
        return bool(changed)

    def depends(self, side: int) -> Dependence:
        """Return what queries (side 0), keys (1) or values (2) depend on before any rotation."""
        shape, generator = self._call.x.shape, torch.Generator().manual_seed(2)
        vectors = torch.randn(2, shape[-1], generator=generator, dtype=torch.float64)
        one, other = vectors.to(self._call.q.device)
        mixed = one.repeat(*shape[:2], 1)
        mixed[:, 0] = other
        alike, different, first = (
            self.projections(x)[side].unflatten(0, shape[:2])
            for x in (one.expand(shape).contiguous(), other.expand(shape).contiguous(), mixed)
        )
        limit = ROTATION_TOLERANCE * alike.abs().amax()

        def differ(a: Tensor, b: Tensor) -> bool:
            return a.numel() > 0 and bool((a - b).abs().amax() > limit)

        others = differ(alike[:, 1:], first[:, 1:])
        return Dependence(differ(alike, different), others, differ(alike, alike[:, :1]))

    def turns(self, known: Iterable[Turns] = ()) -> Turns | None:
        """Return the rotation of the call's tokens, read off random tokens before and after it.

        It is refused where positions act in another way, or differ from sample to sample.

        Args:
            known: of other layers; the last that takes the ones to the others is taken over.
        """
        given = self._call.run.kwargs.get(POSITIONS)
        if given is None:
            return self._own_turns(known)
        tables = (given,) if isinstance(given, Tensor) else given
        if any(t.ndim > 2 and not torch.equal(t, t[:1].expand_as(t)) for t in tables):
            raise self._call.unsupported(
                "is given samples with different positions (capture them one at a time, or pad "
                "on the right)",
                DifferentPositionsError,
            )
        for stub in self.stubs:
            stub.centred = False  # centred vectors do not span the space
        generator, d = torch.Generator().manual_seed(0), self._call.q.shape[-1]
        candidates = [turns for turns in known if same_values(turns.positions, given)]
        before: list[Tensor] = []
        after: list[Tensor] = []
        while sum(map(len, before)) < d + 4:
            x = self.random(generator)
            before += self._vectors(x, turned=False)
            after += self._vectors(x, turned=True)
            while candidates:
                turns = candidates.pop()
                pairs = torch.cat(before), torch.cat(after)
                if len(turns.order) == d and misses(*turns[1:], *pairs) <= ROTATION_TOLERANCE:
                    return turns._replace(positions=given)
        try:
            return Turns(given, *find_rotation(torch.cat(before), torch.cat(after)))
        except CaptureError as error:
            raise self._call.unsupported(f"cannot be captured: {error}") from error

    def _own_turns(self, known: Iterable[Turns]) -> Turns | None:
        """Return the rotation that the module makes itself, relative to that of the first token.

        It is read off one token that stands at every position; None where there is none, or
        something else is made of positions, which the check of rebuilt queries tells.
        """
        for stub in self.stubs:
            stub.centred = False
        shape, d = self._call.x.shape, self._call.q.shape[-1]
        generator = torch.Generator().manual_seed(4)
        found: list[Tensor] = []
        while sum(map(len, found)) < d + 4:
            x = self.random(generator)[:, :1].expand(shape).contiguous()
            found += self._vectors(x)
            if all(_alike(t) for t in found):
                return None
        after = torch.cat(found)
        before = after[:, :1].expand(after.shape)
        for turns in known:
            fits = turns.positions is None and len(turns.order) == d
            fits = fits and (turns.rotation is None or turns.rotation.tokens == shape[1])
            if fits and misses(*turns[1:], before, after) <= ROTATION_TOLERANCE:
                return turns
        try:
            return Turns(None, *find_rotation(before, after))
        except CaptureError:
            return None

    def offsets(self, *, constant: bool = False) -> tuple[Offsets, list[Tensor]] | None:
        """Return what positions add to queries and keys, and q, k, v of zero tokens.

        The latter (samples N, H or H_kv, d) each. None where they are the same at all positions,
        unless ``constant``, or positions act on values, too. That it does not depend on the tokens
        is for the check of rebuilt queries.
        """
        shape, heads = self._call.x.shape, self._call.q.shape[1]
        zero = torch.zeros(shape, dtype=torch.float64, device=self._call.q.device)
        some = self.random(torch.Generator().manual_seed(5))
        made, other = (self.projections(tokens, turned=True) for tokens in (zero, some))
        found: list[Tensor | None] = [None, None]
        for side in ("qkv".index(name) for name in self._call.sides):
            each = made[side].unflatten(0, shape[:2])
            moved = each - each[:1, :1]  # (samples, N, H or H_kv, d)
            if float(moved.abs().amax()) > ROTATION_TOLERANCE * float(other[side].abs().amax()):
                if side == 2:
                    return None
                alike = bool((moved == moved[:1]).all())
                t = moved[: 1 if alike else None].permute(2, 0, 1, 3)
                found[side] = t.repeat_interleave(heads // len(t), 0).contiguous()
        if constant or any(t is not None for t in found):
            return Offsets(*found), list(made)
        return None

    def random(self, generator: torch.Generator) -> Tensor:
        """Return random tokens, (samples, N, D), float64."""
        x = torch.randn(self._call.x.shape, generator=generator, dtype=torch.float64)
        return x.to(self._call.q.device)

    def seen(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return q, k, v of tokens (samples, N, D), and what else attention is handed."""
        stopped = self._stop(tokens, True)
        q, k, v = stopped.qkv
        return q, k, v, stopped.others

    def _stop(self, tokens: Tensor, turned: bool) -> _Stopped:
        heads = self._call.q.shape[1]

        def stop(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
        ) -> tuple[Tensor, Any]:
            raise _Stopped((q, k, v), {"mask": mask} | kw)

        def stop_torch(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            mask = additive_mask(query, key, attn_mask, is_causal)
            raise _Stopped((query, key, value), {"mask": mask, "scale": scale})

        def stop_by_hand(outputs: HeadOutputs) -> None:
            form = None if outputs.form is None else in_heads(outputs.form, heads)
            if form is not None and outputs.probabilities is not None:
                raise _Stopped(form[:3], {"scores": outputs.probabilities.values})

        args, kwargs = replaced(self._call, tokens)
        if not turned and kwargs.get(POSITIONS) is not None:
            kwargs[POSITIONS] = _unturned(kwargs[POSITIONS])
        try:
            with ExitStack() as seeing:
                seeing.enter_context(handling(stop))
                if self._call.way != INTERFACE:
                    seeing.enter_context(handling_fused(stop_torch))
                    follower = Follower(stop_by_hand, fused=stop_torch)
                    seeing.enter_context(follower)
                    seeing.enter_context(WithoutCasts())
                self._owner(*args, **kwargs)
        except _Stopped as end:
            return end
        except LipboundError:
            raise
        except RAISED as error:
            why = first_line(error)
            raise self._call.unsupported(
                f"cannot be run by itself on other token vectors ({why})"
            ) from error
        raise CaptureError(f"layer {self._call.name}: probing did not reach its attention")


def _alike(vectors: Tensor) -> bool:
    """Return whether vectors (many, N, d) are the same at all positions."""
    size = ROTATION_TOLERANCE * vectors.abs().amax()
    return not bool((vectors - vectors[:, :1]).abs().amax() > size)


def _unturned(positions: Any) -> Any:
    """Return position embeddings that turn nothing: cosines 1 and sines 0, or complex numbers 1."""
    if isinstance(positions, Tensor):
        return torch.ones_like(positions)
    cos, sin = positions
    return torch.ones_like(cos), torch.zeros_like(sin)


def _positions(
    layer: ProbedLayer, call: Call, known: Iterable[Turns]
) -> tuple[Turns | None, tuple[Offsets, list[Tensor]] | None]:
    """Return what positions do: turn queries and keys, or add to them (see `ProbedLayer.offsets`).

    Raises:
        CaptureError: neither.
    """
    if call.sides != "qkv":
        return None, layer.offsets()
    try:
        turns = layer.turns(known)
    except DifferentPositionsError:
        raise
    except CaptureError:
        offsets = layer.offsets(constant=True)
        if offsets is None:
            raise
        return None, offsets
    return turns, layer.offsets() if turns is None else None


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
    found = read_normalisations(call, layer.stubs, layer.projections, sides)
    samples, n, width = call.x.shape
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).double().to(call.x.device)
    latents = [one.latent for one in found if one is not None and one.latent is not None]
    pieces: list[list[Tensor]] = []
    for some in rows.split(samples * n):
        made = layer.projections(filled(some, samples, n))
        given = [stub.given.reshape(samples * n, -1) for stub in latents]
        pieces.append([y[: len(some)] for y in (*made, *given)])
    together = [torch.cat(each) for each in zip(*pieces, strict=True)]
    for side in {0, 1, 2} - set(sides):  # made of another stream
        together[side] = rows.new_zeros(width + 1, *together[side].shape[1:])
    maps, vectors = together[:3], together[3:]  # (D + 1, H or H_kv, d) and (D + 1, n) each
    turns, offsets = (None, None) if latents else _positions(layer, call, known)
    if latents and len(sides) == 3:
        turns = layer.turns(known)
    if offsets is not None:
        there = torch.arange(width + 1, device=rows.device) % (samples * n)
        each = [
            [y[: len(some)] for y in layer.projections(filled(some, samples, n), turned=True)]
            for some in rows.split(samples * n)
        ]
        moved = [torch.cat(parts) for parts in zip(*each, strict=True)]
        for side in sides:
            base = offsets[1][side]
            maps[side] = moved[side] - base[there] + base[0]
    if turns is not None:
        places = torch.arange(width + 1, device=rows.device) % (samples * n) % n
        maps[:2] = [turns.undone(t, places) for t in maps[:2]]
    w = [(y[1:] - y[0]).transpose(0, 1).contiguous() for y in maps]
    b = [y[0] if bool((y[0] != 0).any()) else None for y in maps]
    over_latents = {
        id(stub): ((t[1:] - t[0]).contiguous(), t[0] if bool((t[0] != 0).any()) else None)
        for stub, t in zip(latents, vectors, strict=True)
    }
    for side, one in enumerate(found):
        if one is not None and one.constant is not None and (bias := b[side]) is not None:
            b[side] = bias - one.constant
    heads = call.q.shape[1]

    def each_head(t: Tensor, side: int) -> Tensor:
        t = t if turns is None or side == 2 else t[..., turns.order]
        return t.repeat_interleave(heads // t.shape[0], 0)

    def norm(side: int) -> QKNorm | None:
        one = found[side]
        if one is None:
            return None
        read, part = one.norm, one.part
        if one.together:  # the vectors of all heads, whose projection is (heads, D, d) head by head
            bias = b[side]
            over = w[side].transpose(0, 1).flatten(1), None if bias is None else bias.flatten()
            read = replace(read, over=over)
        if one.latent is not None:
            part = None if part is None or bool(part.all()) else each_head(part[None], side)[0]
            read = replace(read, over=over_latents[id(one.latent)], part=part)
        bias = None if read.bias is None else each_head(read.bias, side)
        return replace(read, gain=each_head(read.gain, side), bias=bias)

    return ProbedWeights(
        tuple(each_head(t, side) for side, t in enumerate(w)),
        tuple(None if t is None else each_head(t, side) for side, t in enumerate(b)),
        probe_output(call, call.consumer, call.out),
        norm(0),
        norm(1),
        norm(2),
        probe_gate(call),
        turns,
        None if offsets is None else offsets[0],
        sums,
    )
