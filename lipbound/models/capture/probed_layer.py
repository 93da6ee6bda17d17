"""A layer that is fed chosen tokens and stopped at the attention interface, so that what it makes
of them can be read off."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipbound.attention.variants.rotary import Rotation
from lipbound.errors import CaptureError, DifferentPositionsError, LipboundError
from lipbound.models.capture.norm_stub import stub_norms
from lipbound.models.capture.recorder import RAISED, Call, handling, hidden_states
from lipbound.models.capture.rotary_fit import ROTATION_TOLERANCE, find_rotation, misses
from lipbound.models.offload import plain_copy
from lipbound.models.quiet import first_line

Tensors = tuple[Tensor, ...]
POSITIONS = "position_embeddings"
"""The argument in which transformers hands rotary embeddings to a layer."""


class _Abort(Exception):
    """Ends a probing pass at the interface, carrying q, k, v and whatever else was handed over."""

    def __init__(self, qkv: Tensors, others: dict[str, Any]):
        self.qkv, self.others = qkv, others


class Dependence(NamedTuple):
    """Facts on queries, keys or values: whether they depend on the layer's tokens, on tokens other
    than their own, on the position of their own."""

    on_tokens: bool
    on_others: bool
    on_position: bool


class ProbedLayer:
    """A copy of the layer of a call, in float64, stopped at the attention interface.

    Attributes:
        stubs: what stands for the copy's normalisations.
    """

    def __init__(self, call: Call):
        self._call = call
        positions = call.kwargs.get(POSITIONS)
        pair = (
            isinstance(positions, tuple | list)
            and len(positions) == 2
            and all(isinstance(t, Tensor) for t in positions)
        )
        if not (positions is None or pair or isinstance(positions, Tensor)):
            raise call.unsupported(
                f"is given position embeddings of an unknown make ({type(positions).__name__}; "
                "known are cosines and sines)"
            )
        self._owner = plain_copy(call.module).to(call.q.device).double()
        self.stubs = stub_norms(self._owner)

    def projections(self, tokens: Tensor, *, turned: bool = False) -> Tensors:
        """q, k, v of tokens (samples, N, D), each (samples N, H or H_kv, d); with the call's
        position embeddings, or unturned."""
        return tuple(t.transpose(1, 2).flatten(0, 1) for t in self._stopped(tokens, turned).qkv)

    def refuse_what_depends_on_tokens(self) -> None:
        """Raise CaptureError if masks, biases or sinks change with the tokens: their derivative
        would be missed, which no forward pass shows."""
        generator = torch.Generator().manual_seed(1)
        shape, device = hidden_states(self._call).shape, self._call.q.device
        inputs = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
            for _ in range(2)
        )
        first, second = (self._stopped(x, turned=True).others for x in inputs)
        for name, value in first.items():
            if not same_values(value, second.get(name)):
                raise self._call.unsupported(
                    f"computes its {name.replace('_', ' ')} from its tokens"
                )

    def depends(self, side: int) -> Dependence:
        """The `Dependence` of queries (side 0), keys (1) or values (2), before they are rotated."""
        shape, generator = hidden_states(self._call).shape, torch.Generator().manual_seed(2)
        one, other = torch.randn(2, shape[-1], generator=generator, dtype=torch.float64).to(
            self._call.q.device
        )
        mixed = one.repeat(*shape[:2], 1)
        mixed[:, 0] = other
        alike, different, first = (
            self.projections(x, turned=False)[side].unflatten(0, shape[:2])
            for x in (one.expand(shape).contiguous(), other.expand(shape).contiguous(), mixed)
        )
        limit = ROTATION_TOLERANCE * alike.abs().amax()

        def differ(a: Tensor, b: Tensor) -> bool:
            return a.numel() > 0 and bool((a - b).abs().amax() > limit)

        return Dependence(
            differ(alike, different),
            differ(alike[:, 1:], first[:, 1:]),
            differ(alike, alike[:, :1]),
        )

    def _stopped(self, tokens: Tensor, turned: bool) -> _Abort:
        """What the copy hands to the attention interface."""

        def stop(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kw: Any
        ) -> tuple[Tensor, Any]:
            raise _Abort((q, k, v), {"mask": mask} | kw)

        args, kwargs = _replaced(self._call, tokens)
        if not turned and kwargs.get(POSITIONS) is not None:
            kwargs[POSITIONS] = _unturned(kwargs[POSITIONS])
        try:
            with handling(stop):
                self._owner(*args, **kwargs)
        except _Abort as end:
            return end
        except RAISED as error:
            if isinstance(error, LipboundError):
                raise
            raise self._call.unsupported(
                f"cannot be run by itself on other token vectors ({first_line(error)})"
            ) from error
        raise CaptureError(
            f"layer {self._call.name}: probing did not reach the attention interface"
        )

    def rotation(
        self, known: Iterable[tuple[Rotation | None, Tensor]] = ()
    ) -> tuple[Rotation | None, Tensor]:
        """The rotation of the call's tokens, from the queries and keys of random tokens before and
        after it: one that is ``known``, with the order of its coordinates, where it takes the ones
        to the others."""
        shape = hidden_states(self._call).shape
        given = self._call.kwargs[POSITIONS]
        if any(
            len(t) > 1 and not torch.equal(t, t[:1].expand_as(t))
            for t in ((given,) if isinstance(given, Tensor) else given)
            if t.ndim > 2
        ):
            raise self._call.unsupported(
                "is given samples with different positions (capture them one at a time, or pad "
                "on the right)",
                DifferentPositionsError,
            )
        for stub in self.stubs:
            stub.centred = False  # centred vectors do not span the space
        generator = torch.Generator().manual_seed(0)
        candidates = list(known)
        before: list[Tensor] = []
        after: list[Tensor] = []
        while sum(map(len, before)) < self._call.q.shape[-1] + 4:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self._call.q.device)
            for vectors, turned in ((before, False), (after, True)):
                found = self.projections(x, turned=turned)[:2]
                vectors.extend(
                    t.unflatten(0, shape[:2]).transpose(1, 2).flatten(0, 1) for t in found
                )
            while candidates:
                rotation, order = candidates.pop()
                if (
                    len(order) == self._call.q.shape[-1]
                    and misses(rotation, order, torch.cat(before), torch.cat(after))
                    <= ROTATION_TOLERANCE
                ):
                    return rotation, order
        try:
            return find_rotation(torch.cat(before), torch.cat(after))
        except CaptureError as error:
            raise self._call.unsupported(f"cannot be captured: {error}") from error


def _unturned(positions: Any) -> Any:
    """Position embeddings that turn nothing: cosines 1 and sines 0, or complex numbers 1."""
    if isinstance(positions, Tensor):
        return torch.ones_like(positions)
    cos, sin = positions
    return torch.ones_like(cos), torch.zeros_like(sin)


def _replaced(call: Call, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The owner's arguments with X replaced, floating tensors in float64, and no cache."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128)
        return tuple(double(v) for v in value) if isinstance(value, tuple) else value

    given = hidden_states(call)
    args, kwargs = (
        (x if a is given else double(a) for a in call.args),
        {n: x if a is given else double(a) for n, a in call.kwargs.items()},
    )
    return tuple(args), {
        name: None if name in ("past_key_values", "layer_past") else value
        for name, value in kwargs.items()
    }


def same_values(a: Any, b: Any) -> bool:
    """Whether two tensors, or tuples or numbers, are equal; other objects count as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, Tensor | int | float | None) or isinstance(b, Tensor | int | float | None):
        return type(a) is type(b) and a == b
    return True
