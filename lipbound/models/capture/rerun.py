"""A module run again by itself, in float64, with other tensors in the place of its tokens.

Affine maps are read off what it makes of them: of queries, keys and values in
`lipbound.models.capture.probing`; here the gate of the outputs of heads, and their map to what the
layer returns. That is read off the module that projects them, wrappers and hooks included, where
the layer returns just what this one returns, or leaves projecting to it; else off the layer, run
again with other outputs in the place of its heads'.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from lipbound.attention.variants.gate import Gate
from lipbound.errors import CaptureError
from lipbound.models.capture.seeing import interface, recording
from lipbound.models.capture.seeing.follower import BY_HAND, Follower, Form, Heads, outputs_of
from lipbound.models.capture.seeing.recording import Call, ModuleRun, same_numbers, samples_first
from lipbound.models.other_libraries import explained
from lipbound.models.weight_files import plain_copy

CAPTURE_TOLERANCE = 1e-4
"""Largest relative error of a rebuilt tensor.

Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude.
"""
NARROW = (torch.float32, torch.bfloat16, torch.float16)


QKV, HEADS, PROJECTION, RETURN = "qkv", "heads", "projection", "return"
"""Where a pass stops: when attention is asked for, behind it, before its outputs are projected, or
at its end."""


class Stopped(BaseException):
    """The end of a pass at the point that is looked for, which no code of a model catches."""


DETACHED = (Tensor.detach, torch.detach, Tensor.detach_, Tensor.data.__get__)  # type: ignore[attr-defined]


class WithoutCasts(TorchFunctionMode):
    """Leave float64 tensors in float64 where a model's own code casts to a narrower dtype.

    Tensors are not detached either, and gradients not switched off: what a model takes out of its
    training moves its outputs all the same.

    Attributes:
        detached: whether the code detached some that have gradients.
    """

    detached = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else next(iter(kwargs.values()), None)
        if func is torch._C._set_grad_enabled and first is False:
            return None
        if isinstance(first, Tensor) and first.dtype not in NARROW:
            if func in DETACHED:
                self.detached |= first.requires_grad
                return first
            # torch's gradients of one sample are wrong
            if func is nn.functional.batch_norm and first.ndim > 3:
                return func(first.flatten(2), *args[1:], **kwargs).view(first.shape)
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return first.double()
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
            kwargs |= {name: torch.float64 for name, value in kwargs.items() if _is_narrow(value)}
        return func(*args, **kwargs)


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


class _UpTo(Follower):
    """Stops a pass at a place of a layer's attention, and may put other outputs of heads there.

    Args:
        call: of the layer.
        position: number of calls of attention before it.
        place: of `QKV`, `HEADS`, `PROJECTION` and `RETURN`.
        outputs: (samples, N, heads, d_v), in the place of what heads make; of a layer of one call.

    Attributes:
        numbers: of the calls that make up the layer.
        found: calls so far.
        stopped: what was found where the pass was stopped, if it was.
    """

    fused = staticmethod(interface.plain_attention)

    def __init__(self, call: Call, position: int, place: str, outputs: Tensor | None = None):
        super().__init__(call.adds)
        self._call, self._place, self._outputs = call, place, outputs
        shape = call.out.shape if outputs is None else outputs.shape
        self._form = call.form or Form(shape[2] if len(shape) > 2 else 1)
        self.numbers = [position + piece for piece in call.pieces]
        self.found: list[Heads] = []
        self.stopped: list[Tensor | None] = []

    def _stop(self, at: Tensor | None = None) -> None:
        self.stopped.append(at)
        raise Stopped

    def _is_last(self) -> bool:
        return len(self.found) > max(self.numbers)

    def asked(self, heads: Heads) -> None:
        before = self._place == QKV and self._call.form is None
        if before and heads.way == self._call.way and len(self.found) == self.numbers[0]:
            self.found.append(heads)
            self._stop()

    def computed(self, heads: Heads) -> Tensor | None:
        self.found.append(heads)
        if self._place in (QKV, HEADS) and self._is_last():
            self._stop(None if self._place == QKV else outputs_of(heads, self._form))
        if self._outputs is None:
            return None
        made, new = outputs_of(heads, self._form), heads.raw.clone()
        assert made is not None
        start = made.storage_offset() - heads.raw.storage_offset()
        new.as_strided(made.shape, made.stride(), start).copy_(self._outputs)
        return new

    def projected(self, x: Tensor, heads: Heads) -> None:
        done = self._place == PROJECTION and self._is_last()
        if done and self.found[self.numbers[0]] in heads.calls:
            self._stop(x)

    def given(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Do the same before the hooks of a module that is given outputs of heads."""
        if args and isinstance(heads := self.kind(args[0]), Heads):
            self.projected(args[0], heads)


class ModuleCopy:
    """A copy of a module in float64, which is run again with what the module was given.

    Tensors that it was given several times over, as copies, are one.

    Args:
        call: of attention in it.
        run: of the module, around the call, with the arguments that it was given.

    Attributes:
        inputs: the floating-point tensors that it was given.
        casts: the mode in which it runs.
    """

    def __init__(self, call: Call, run: ModuleRun):
        self.run, self.call, self.casts = run, call, WithoutCasts()
        self._position = next(before for one, before in call.around if one is run)
        self.module = self._copied(run.module)
        # modules may be arguments, too, such as biases of relative positions
        self._given = tree_map(self._copied, (run.args, run.kwargs))
        self.inputs: list[Tensor] = []
        self._first: dict[int, Tensor] = {}  # by its identity, the input that a tensor is
        for t in run.tensors:
            if t.is_floating_point() and id(t) not in self._first:
                first = next((one for one in self.inputs if same_values(one, t)), t)
                self._first[id(t)] = first
                self.inputs += [t] if first is t else []

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return value
        return plain_copy(value).to(self.call.q.device).double().requires_grad_(False)

    def again(
        self,
        changed: Iterable[tuple[Tensor, Tensor]] = (),
        place: str = PROJECTION,
        outputs: Tensor | None = None,
        **named: Any,
    ) -> tuple[Any, list[Heads]]:
        """Run the module with other inputs up to some place.

        Args:
            changed: pairs of a tensor that the module was given, and one in float64 in its place.
            place: what is wanted: nothing beside the calls for `QKV`; outputs of heads as (samples,
                N, heads, d_v) for `HEADS` (of a layer of one call); what the output projection is
                given, or else the module returns, for `PROJECTION`; that for `RETURN`.
            outputs: of heads, in the place of what they make.
            named: other arguments that are exchanged.

        Returns:
            The tensor, and the calls of attention that make up the layer.

        Raises:
            CaptureError: it cannot be run by itself, or computes no such attention.
        """
        follower = _UpTo(self.call, self._position, place, outputs)
        new = {id(self._first[id(old)]): new for old, new in changed}
        replaced = {key: new[id(t)] for key, t in self._first.items() if id(t) in new}
        args, kwargs = self._given
        args, kwargs = tree_map(partial(_exchanged, replaced), (args, {**kwargs, **named}))
        refusal = self.call.unsupported("cannot be run by itself on other token vectors ({})")
        before, _, after = str(refusal).partition("{}")
        end: Any = None
        with suppress(Stopped), ExitStack() as stack:
            stack.enter_context(explained(CaptureError, before, after))
            if place == PROJECTION and (inner := self._projection()) is not None:
                hook = inner.register_forward_pre_hook(follower.given, prepend=True)
                stack.enter_context(hook)
            if self.call.way == BY_HAND:
                stack.enter_context(recording.ThroughPython())  # type: ignore[no-untyped-call]
            stack.enter_context(interface.unmoved(self.module))
            stack.enter_context(follower.following())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            stack.enter_context(self.casts)
            end = self.module(*args, **kwargs)
        if len(follower.found) <= max(follower.numbers):
            raise self.call.unsupported("computes no attention when it is run by itself")
        parts = [follower.found[number] for number in follower.numbers]
        if follower.stopped:
            return follower.stopped[0], parts
        if place == RETURN and (returned := recording.first_tensor(end)) is not None:
            return returned, parts
        kinds = [(t, follower.kind(t)) for t in tree_leaves(end)]
        made = [t for t, kind in kinds if isinstance(kind, Heads) and parts == [*kind.calls]]
        if not made and len(parts) > 1:
            raise self.call.unsupported(f"calls attention {len(parts)} times when it runs")
        return next(iter(made), parts[0].raw), parts

    def _projection(self) -> nn.Module | None:
        """Return the module in this one that is given the outputs of heads, if one is."""
        run, start = self.call.projection, f"{self.run.name}." if self.run.name else ""
        if run is None or run.name == self.run.name or not run.name.startswith(start):
            return None
        return self.module.get_submodule(run.name.removeprefix(start))

    def with_tokens(
        self, tokens: Tensor, place: str, outputs: Tensor | None = None, **named: Any
    ) -> tuple[Any, list[Heads]]:
        """Run it up to some place with the call's tokens, (samples, N, D), exchanged."""
        given = self.call.given
        if samples_first(given, *self.call.shape) is not given:
            tokens = tokens.transpose(0, 1)
        return self.again([(given, tokens.reshape(given.shape))], place, outputs, **named)


def _exchanged(replaced: dict[int, Tensor], value: Any) -> Any:
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, Cache):
        return interface.copied_state(value) if value.get_seq_length() else None
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value.to(torch.promote_types(value.dtype, torch.float64))
    return value


def same_values(a: Any, b: Any) -> bool:
    """Return whether two tensors, tuples or numbers are equal; other objects count as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, Tensor | int | float | None) or isinstance(b, Tensor | int | float | None):
        return type(a) is type(b) and a == b
    return True


def relative_error(mine: Tensor, own: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of the second."""
    size = own.abs().amax().clamp_min(torch.finfo(own.dtype).tiny)
    return float((mine - own).abs().amax() / size)


def on_units(slots: Tensor, width: int, made: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """Return what functions make of a zero token and of all unit vectors, (width + 1, ...) each.

    Args:
        slots: (samples, N), where tokens may stand: not at zeros.
        width: of the tokens.
        made: takes tokens (samples, N, width) to tensors with a row for each slot.
    """
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).double().to(slots.device)
    pieces = []
    places = slots.nonzero()
    for some in rows.split(len(places)):
        tokens = rows.new_zeros(*slots.shape, width)
        tokens[tuple(places[: len(some)].T)] = some
        pieces.append([y[: len(some)] for y in made(tokens)])
    return [torch.cat(each) for each in zip(*pieces, strict=True)]


def affine(made: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return linear part (D, ...) and bias (None for zero) of a map that `on_units` read."""
    return made[1:] - made[0], made[0] if bool((made[0] != 0).any()) else None


CHECKED = 64
"""Number of recorded outputs of all heads that tell whether their projection is affine."""


def probe_output(call: Call, heads: Tensor) -> Tensor | None:
    """Return the map of the heads' outputs to what their module returns, (heads, d_v, D_out).

    Where the module returns the heads' outputs as they are, or a whole block with a residual
    connection or a normalisation, it is the map of the module that projects them. None where there
    is no such map.

    Args:
        call: of the layer.
        heads: outputs of heads, (..., heads, d_v).

    Raises:
        CaptureError: it is not affine.
    """
    own, run = from_heads(call), call.projection
    if own is not None and own.shape[:2] == heads.shape[-2:]:
        return own
    if run is None or ((call.changed or not call.formed) and not _returns_all(call, run)):
        return None
    return _projection(call, run, *heads.shape[-2:])


def _projection(call: Call, run: ModuleRun, count: int, d_v: int) -> Tensor | None:
    """Return slices of a module that is given flattened outputs of heads, (heads, d_v, D_out)."""
    copy, tensors = plain_copy(run.module).to(call.q.device).double(), (run.args[0], run.returned)
    try:
        flat, own = (t.reshape(-1, t.shape[-1]).double() for t in tensors if t is not None)
        known = flat.isfinite().all(-1)  # padding may be undefined
        flat, own = (t[known][:: -(-len(t) // CHECKED)] for t in (flat, own))
        eye = torch.eye(count * d_v, dtype=torch.float64, device=flat.device)
        zero, made = copy(torch.zeros_like(eye[:1])), copy(flat)
        w_o: Tensor = copy(eye) - zero
        size = flat.abs() @ w_o.abs()
        affine = _close(made - zero, flat @ w_o, size) and _close(own, made, size)
    except Exception:  # it takes other tensors than these
        return None
    if not affine:
        name = type(run.module).__name__
        raise CaptureError(f"layer {call.name}: its output projection ({name}) is not affine")
    return w_o.view(count, d_v, -1)


def from_heads(call: Call) -> Tensor | None:
    """Return the map of heads' outputs where it is no single module's, (heads, d_v, D_out).

    None where it is, where it differs from token to token, or is not affine in a block that its
    tokens also enter in another way.

    Raises:
        CaptureError: a module makes something of the outputs of its heads alone that is not affine.
    """
    if not call.w_o:
        # the innermost run around it that returns other than the outputs of its heads
        runs = (run for run, before in call.around if not before and run.inside == 1)
        run = next((run for run in runs if not same_numbers(run.returned, call.out)), None)
        own = call.consumer and call.projection
        single = own and not call.changed and _returns_all(call, own)
        whole = run is not None and not single and call.formed
        call.w_o.append(_through(call, run) if run and whole else None)
    return call.w_o[0]


def _returns_all(call: Call, own: ModuleRun) -> bool:
    """Return whether nothing follows the projection in the module that calls attention."""
    inner = call.around[0][0]
    inside = own.name.startswith(f"{inner.name}." if inner.name else "")
    return not inside or same_numbers(inner.returned, own.returned)


def _close(own: Tensor, mine: Tensor, size: Tensor | None = None) -> bool:
    """Tell whether rebuilt outputs are a module's own, relative to the numbers they are sums of."""
    least = own if size is None else 1e-3 * size
    limit = CAPTURE_TOLERANCE * torch.maximum(own.abs().amax(), least.abs().amax())
    return own.shape == mine.shape and bool((own - mine).abs().amax() <= limit)


def _through(call: Call, run: ModuleRun) -> Tensor | None:
    (s, n, count, d_v), real = call.out.shape, call.valid_rows
    real = torch.ones_like(call.out[..., 0, 0], dtype=torch.bool) if real is None else real
    heads = call.out.double().nan_to_num() * real[..., None, None]
    flat = heads[real].flatten(1)

    def rows(y: Tensor | None) -> Tensor:
        if y is None or y.numel() % (s * n):
            raise CaptureError("its tokens are not known")
        return samples_first(y, s, n).reshape(s, n, -1)[real].double()

    def made(outputs: Tensor, others: Iterable[tuple[Tensor, Tensor]] = ()) -> Tensor:
        return rows(copy.again(others, RETURN, outputs.reshape(call.out.shape))[0])

    try:
        copy = ModuleCopy(call, run)
        zero, own, twice = (made(factor * heads) for factor in (0.0, 1.0, 2.0))
        if _close(rows(run.returned), own) and _close(twice - zero, 2 * (own - zero)):
            w_o, _ = affine(on_units(real, count * d_v, lambda units: [made(units) - zero])[0])
            return w_o.view(count, d_v, -1) if _close(own - zero, flat @ w_o) else None
        moved = [(t, t.double() + t.double().cos()) for t in copy.inputs]
        alone = not call.changed and call.consumer and _close(own, made(heads, moved))
    except CaptureError:
        return None
    if alone:
        raise call.unsupported("makes something of the outputs of its heads that is not affine")
    return None


def probe_gate(call: Call) -> Gate | None:
    """Return the gate of a call's head outputs, float64; None where there is none.

    Raises:
        CaptureError: what stands between attention and its projection is no gate: sigmoids of an
            affine map of the output's own token.
    """
    if not call.gated or call.projected is None:
        return None
    layer = ModuleCopy(call, call.run)

    def logits(tokens: Tensor) -> list[Tensor]:
        outputs = torch.ones_like(call.out, dtype=torch.float64)
        ends = [layer.with_tokens(tokens, PROJECTION, size * outputs)[0] for size in (1.0, 2.0)]
        one, two = (end.reshape(outputs.shape) for end in ends)
        off = float((two - 2 * one).abs().amax())
        if not (bool((one > 0).all() and (one < 1).all()) and off <= CAPTURE_TOLERANCE):
            raise call.unsupported(call.changed)
        return [torch.logit(one).flatten(0, 1)]

    w, b = affine(on_units(torch.ones_like(call.x[..., 0]), call.x.shape[-1], logits)[0])
    gate = Gate(w.transpose(0, 1).contiguous(), b)
    made = torch.sigmoid(gate.logits(call.x)).transpose(1, 2) * call.out.double()
    own = call.projected.reshape(call.out.shape).double()
    size, off = own.nan_to_num().abs().amax(), (made - own).nan_to_num().abs().amax()
    if not bool(off <= CAPTURE_TOLERANCE * size):
        raise call.unsupported(call.changed)
    return gate
