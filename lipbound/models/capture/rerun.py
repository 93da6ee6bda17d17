"""A module run again by itself, in float64, with other tensors in the place of its tokens.

Affine maps are read off what it makes of them: those of the outputs of heads and their gate in
`lipbound.models.capture.outputs`, of queries, keys and values in `lipbound.models.capture.probing`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from lipbound.errors import LipboundError
from lipbound.models.capture.seeing.call import Call, ModuleRun
from lipbound.models.capture.seeing.follower import Follower
from lipbound.models.capture.seeing.interface import RAISED, copied_state, unmoved
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line

CAPTURE_TOLERANCE = 1e-4
"""Largest relative error of a rebuilt tensor.

Affine projections rebuild to 1e-5 or better in float32, others miss by orders of magnitude.
"""
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Stopped(Exception):
    """The end of a pass at the point that is looked for, with what was found there."""


DETACHED = (Tensor.detach, torch.detach, Tensor.detach_, Tensor.data.__get__)  # type: ignore[attr-defined]


class WithoutCasts(TorchFunctionMode):
    """Leave float64 tensors in float64 where a model's own code casts to a narrower dtype.

    New tensors are in float64, too, and what is made of integers. Tensors are not detached either,
    and gradients not switched off: what a model takes out of its training moves its outputs all the
    same.

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
        if isinstance(first, Tensor) and first.dtype not in NARROW:
            if func in DETACHED:
                self.detached |= first.requires_grad
                return first
            if func is F.batch_norm and first.ndim > 3:  # torch's gradients of one sample are wrong
                return func(first.flatten(2), *args[1:], **kwargs).view(first.shape)
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return first.double()
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
        self.module = self._copied(run.module)
        # modules may be arguments, too, such as biases of relative positions
        self._given = tree_map(self._copied, (run.args, run.kwargs))
        self.inputs: list[Tensor] = []
        self._first: dict[int, Tensor] = {}  # by its identity, the input that a tensor is
        for t in tree_leaves((run.args, run.kwargs)):
            if isinstance(t, Tensor) and t.is_floating_point() and id(t) not in self._first:
                first = next((one for one in self.inputs if same_values(one, t)), t)
                self._first[id(t)] = first
                self.inputs += [t] if first is t else []

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return value
        return plain_copy(value).to(self.call.q.device).double().requires_grad_(False)

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
        args, kwargs = self._given
        args, kwargs = tree_map(partial(_exchanged, replaced), (args, {**kwargs, **named}))
        casts = WithoutCasts()
        try:
            with unmoved(self.module), follower, casts:
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
        return copied_state(value) if value.get_seq_length() else None
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
