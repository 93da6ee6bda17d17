"""One call of attention in a forward pass: the record that every way of seeing it makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lipbound.attention.scoring import four_axes
from lipbound.errors import CaptureError

INTERFACE, FUSED, BY_HAND = "the interface", "scaled_dot_product_attention", "by hand"
"""Ways to compute attention: through transformers' interface, by torch, or by the module itself."""

HIDDEN = -9999.0
"""Additive mask entries up to this value hide a key: some models write -10000 for the lowest."""


def first_tensor(returned: object) -> Tensor | None:
    """Return the first floating-point tensor of what a module returns."""
    leaves = tree_leaves(returned)
    return next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def samples_first(t: Tensor, samples: int, n: int) -> Tensor:
    """Return (samples, N, D) of (N, samples, D) or itself; (N, N, D) counts as the former."""
    turned = t.ndim == 3 and t.shape[:2] == (n, samples) != (samples, n)
    return t.transpose(0, 1) if turned else t


def same_numbers(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have the same numbers, in whatever order."""
    if a is None or b is None or a.numel() != b.numel():
        return False
    a, b = (t.nan_to_num().flatten() for t in (a, b))
    alike = bool(a.amax() == b.amax() and a.amin() == b.amin())
    return torch.equal(a, b) or (alike and torch.equal(a.sort().values, b.sort().values))


def listed(names: Sequence[str], most: int = 1) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(eq=False)
class ModuleRun:
    """One run of a module in a forward pass.

    Attributes:
        module: what ran.
        name: of the module in the model.
        args: the first argument, where it was given by position.
        kwargs: all other arguments, by name.
        calls: how often the module called attention in this run.
        returned: the first tensor that the module returned.
        learned: those of its tensors that are made of parameters alone, such as learned queries.
        inside: how often it and the modules inside it called attention in this run.
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int = 0
    inside: int = 0
    returned: Tensor | None = None
    learned: list[Tensor] = field(default_factory=list)


@dataclass
class Call:
    """One call of attention, with the run of the module that made it.

    Attributes:
        run: of the module whose attention it is.
        q: queries, (samples, heads, N, d).
        k: keys, (samples, heads or fewer that they share, N, d).
        v: values, (samples, heads or fewer that they share, N, d_v).
        mask: what is added to scores, or None.
        scale: the factor of scores; None for d^-0.5.
        extras: what else the attention function was handed.
        out: head outputs, (samples, N, heads, d_v).
        raw: the same in the layout in which they were computed.
        turn: how many calls the same module made before (ALBERT runs one module as every layer).
        boolean: whether the mask was given as True and False; ``mask`` is what that adds to scores.
        adds: whether these are added to scores as the numbers 1 and 0.
        given_mask: the mask of tokens, (samples, N), that the model (of a composed one the part)
            around the layer was given.
        consumer: the module that projects the head outputs, where it is given just these.
        changed: what happens to the head outputs before they are projected, where something does.
        gated: whether that may be a gate, a factor between 0 and 1 for each.
        way: how it is computed.
        around: the runs that it happened in, the innermost first, each with the number of calls of
            attention before it in that run.
        scores: what the softmax was given, of attention by hand.
        samples: of the pass.
        formed: whether ``q``, ``k``, ``v`` and ``out`` have the axes given above; by hand they may
            be as they were multiplied.
        form: how they were brought to these, where they were not handed over so.
        pieces: places of the calls that were put together, counted in the run from the first.
        stream: the tokens, where they were found otherwise than as the first argument.
        sides: which of queries, keys and values are made of them; all of "qkv" but for
            cross-attention.
        valid_rows: which queries are not padding, (samples, N) bool, or None for all.
        valid_keys: the same of keys, (samples, M) bool.
        reason: why it has no closed form, where that is known.
        projection: the run of the outermost module that is given nothing but the head outputs, or
            what was made of them on the way, and multiplies them with weights.
        projected: what that was given, before hooks on it.
        w_o: what is known of the map to the module's return (`lipbound.models.capture.rerun`).
    """

    run: ModuleRun
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    extras: dict[str, Any]
    out: Tensor
    raw: Tensor
    turn: int = 0
    boolean: bool = False
    adds: bool = False
    given_mask: Tensor | None = None
    consumer: nn.Module | None = None
    changed: str = ""
    gated: bool = False
    way: str = INTERFACE
    around: list[tuple[ModuleRun, int]] = field(default_factory=list)
    scores: Tensor | None = None
    samples: int = 1
    projection: ModuleRun | None = None
    projected: Tensor | None = None
    formed: bool = True
    form: Any = None
    pieces: tuple[int, ...] = (0,)
    stream: Tensor | None = None
    sides: str = "qkv"
    valid_rows: Tensor | None = None
    valid_keys: Tensor | None = None
    reason: str = ""
    w_o: list[Tensor | None] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module that made the call."""
        return self.run.module

    @property
    def name(self) -> str:
        """The name of that module in the model."""
        return self.run.name

    @property
    def given(self) -> object:
        """The token vectors as the module was given them, in whatever layout."""
        first = self.run.args[0] if self.run.args else self.run.kwargs.get("hidden_states")
        return first if self.stream is None else self.stream

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and tokens of the stream."""
        return len(self.q), (self.q if "q" in self.sides else self.k).shape[-2]

    @property
    def x(self) -> Tensor:
        """The token vectors that the module was given, (samples, N, D).

        Those of one sample may have been given without an axis of samples, those of pictures with
        two axes for the tokens, and tokens before samples.

        Raises:
            CaptureError: it was given no such tensor, or attends to other tokens than these.
        """
        if not self.formed:
            raise self.unsupported("multiplies queries and keys in tensors of unknown axes")
        given, (samples, n) = self.given, self.shape
        x = samples_first(given, samples, n) if isinstance(given, Tensor) else given
        if isinstance(x, Tensor) and x.ndim in (2, 4) and x[..., 0].numel() == samples * n:
            x = x.reshape(samples, n, x.shape[-1])
        queries, keys = self.q.shape[-2], self.k.shape[-2]
        apart = self.sides == "qkv" and keys != queries
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] != n or apart:
            raise self.unsupported(
                f"attends with {queries} queries to {keys} keys and is not given one (samples, N, "
                "D) tensor of as many tokens (but several, a cache, or windows cut out of it)"
            )
        return x

    def additive(self) -> Tensor | None:
        """Return what is added to scores: the mask, and biases of relative positions."""
        mask, bias, dtype = self.mask, self.extras.get("position_bias"), self.q.dtype
        if mask is not None:
            mask = mask[..., : self.k.shape[-2]].to(dtype)  # one for a cache may be wider
            mask = four_axes(mask) if self.q.ndim == 4 else mask
        if bias is None:
            return mask
        bias = bias.detach().to(dtype)
        # the lowest number and a bias may overflow
        return bias if mask is None else (mask + bias).clamp_min(torch.finfo(dtype).min)

    def to(self, device: torch.device) -> "Call":
        """Return the call with its tensors on a device; modules stay where they are."""
        if self.q.device == device:
            return self
        copies: dict[int, Tensor] = {}  # what is one tensor stays one

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return copies.setdefault(id(value), value.to(device))

        there = partial(tree_map, copied)
        names = {field.name for field in fields(self)} - {"run", "consumer", "projection", "around"}
        own = {name: there(getattr(self, name)) for name in names}

        def moved(run: ModuleRun) -> ModuleRun:
            parts = ("args", "kwargs", "learned", "returned")
            return replace(run, **{name: there(getattr(run, name)) for name in parts})

        around = [(moved(run), before) for run, before in self.around]
        end = None if self.projection is None else moved(self.projection)
        return replace(self, run=around[0][0], around=around, projection=end, **own)

    def unsupported(self, what: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        """Return the error, of some kind, about something that the layer does."""
        owner = type(self.module).__name__
        return kind(f"layer {self.name}: {owner} {what}, which is not supported")
