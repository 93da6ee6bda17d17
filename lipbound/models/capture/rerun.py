"""A module run again by itself, in float64, with other tensors in the place of its tokens.

Affine maps are read off what it makes of them: here the projection of head outputs and their gate,
those of queries, keys and values in `lipbound.models.capture.probing`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from lipbound.attention.variants.gate import Gate
from lipbound.errors import CaptureError, LipboundError
from lipbound.models.capture.seeing.call import INTERFACE, Call, ModuleRun
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
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Stopped(Exception):
    """The end of a pass at the point that is looked for, with what was found there."""


DETACHED = (Tensor.detach, torch.detach, Tensor.detach_, Tensor.data.__get__)  # type: ignore[attr-defined]


class WithoutCasts(TorchFunctionMode):
    """Leave float64 tensors in float64 where a model's own code casts to a narrower dtype.

    New tensors are in float64, too. Tensors are not detached either, and gradients not switched
    off: what a model takes out of its training moves its outputs all the same.

    Attributes:
        detached: whether the code detached some that have gradients.
    """

    detached = False

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else next(iter(kwargs.values()), None)
        if func is torch._C._set_grad_enabled and first is False:
            return None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func in DETACHED:
                self.detached |= first.requires_grad
                return first
            if func is F.batch_norm and first.ndim > 3:  # torch's gradients of one sample are wrong
                return func(first.flatten(2), *args[1:], **kwargs).view(first.shape)
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return first
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
            kwargs |= {name: torch.float64 for name, value in kwargs.items() if _is_narrow(value)}
        return func(*args, **kwargs)


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


class ModuleCopy:
    """A copy of a module in float64, which is run again with what the module was given.

    Tensors that it was given several times over, as copies, are one.

    Args:
        run: of the module, with the arguments that it was given.
        call: of attention in it, which errors name.
        position: number of calls of attention before that in the run.

    Attributes:
        inputs: the floating-point tensors that it was given.
        detaches: whether its code detaches tensors, which are followed all the same.
    """

    detaches = False

    def __init__(self, run: ModuleRun, call: Call, position: int = 0):
        self.run, self.call, self.position = run, call, position
        self.module = plain_copy(run.module).to(call.q.device).double().requires_grad_(False)
        self.inputs: list[Tensor] = []
        self._first: dict[int, Tensor] = {}  # by its identity, the input that a tensor is
        for t in tree_leaves((run.args, run.kwargs)):
            if isinstance(t, Tensor) and t.is_floating_point() and id(t) not in self._first:
                first = next((one for one in self.inputs if same_values(one, t)), t)
                self._first[id(t)] = first
                self.inputs += [t] if first is t else []

    def again(
        self, follower: Follower, changed: Iterable[tuple[Tensor, Tensor]] = (), **named: Any
    ) -> Any:
        """Return what the module returns, or the `Stopped` that ends the pass before.

        Args:
            follower: sees attention in the pass.
            changed: pairs of a tensor that the module was given, and one in float64 in its place.
            named: other arguments that are exchanged.

        Raises:
            CaptureError: it cannot be run by itself.
        """
        new = {id(self._first[id(old)]): new for old, new in changed}
        replaced = {key: new[id(t)] for key, t in self._first.items() if id(t) in new}
        given = self.run.args, {**self.run.kwargs, **named}
        args, kwargs = tree_map(partial(_exchanged, replaced), given)
        casts = WithoutCasts()
        try:
            with follower, casts:
                return self.module(*args, **kwargs)
        except Stopped as end:
            return end
        except LipboundError:
            raise
        except RAISED as error:
            raise self.call.unsupported(
                f"cannot be run by itself on other token vectors ({first_line(error)})"
            ) from error
        finally:
            self.detaches |= casts.detached

    def with_tokens(self, follower: Follower, tokens: Tensor, **named: Any) -> Any:
        """Return the same as `again` with the call's tokens, (samples, N, D), exchanged."""
        given = self.call.given
        assert isinstance(given, Tensor)
        tokens = tokens.transpose(0, 1) if self.call.tokens_first else tokens
        return self.again(follower, [(given, tokens.reshape(given.shape))], **named)


def _exchanged(replaced: dict[int, Tensor], value: Any) -> Any:
    if id(value) in replaced:
        return replaced[id(value)]
    if isinstance(value, Cache):
        return None if not value.get_seq_length() else copy.deepcopy(value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
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


def on_units(call: Call, made: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """Return what functions make of a zero token and of all unit vectors, (D + 1, ...) each.

    Args:
        call: whose tokens' shape (samples, N, D) is kept.
        made: takes tokens to tensors (samples N, ...), token by token.
    """
    samples, n, width = call.x.shape
    rows = torch.cat([torch.zeros(1, width), torch.eye(width)]).double().to(call.x.device)
    pieces = []
    for some in rows.split(samples * n):
        tokens = rows.new_zeros(samples * n, width)
        tokens[: len(some)] = some
        pieces.append([y[: len(some)] for y in made(tokens.view(samples, n, width))])
    return [torch.cat(each) for each in zip(*pieces, strict=True)]


def affine(made: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return linear part (D, ...) and bias (None for zero) of a map that `on_units` read."""
    return made[1:] - made[0], made[0] if bool((made[0] != 0).any()) else None


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
