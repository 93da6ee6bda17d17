"""Changing a model in training for a while, and doing the same again when its layers are recomputed
in the backward pass (gradient checkpointing)."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lipbound.errors import CaptureError

TRAINING_ATTENTION = "lipbound-training"
"""Name of the attention function in the transformers registry that keeps its probabilities when
asked to."""
ATTRIBUTE = "_attn_implementation_internal"
"""Where a configuration of transformers keeps the name of the attention function."""
lock = threading.RLock()
"""Held where what all threads share is changed."""


class RecomputationNotes(threading.local):
    """Notes on the attention calls of checkpointed layers, which their recomputation in the
    backward pass follows."""

    notes: list[bool] | None = None
    script: Iterator[bool] | None = None


replay = RecomputationNotes()


_lent: dict[tuple[int, str], tuple[Any, Any, int]] = {}
"""Attributes that contexts change: the object, the value before the first of them, and how many
contexts there are."""


@contextmanager
def _lending(objects: Iterable[Any], name: str) -> Iterator[None]:
    """Context after which an attribute is as it was before, once all contexts that overlap have
    ended."""
    kept = {(id(one), name): one for one in objects}
    with lock:
        for key, one in kept.items():
            _, before, count = _lent.get(key, (one, getattr(one, name), 0))
            _lent[key] = (one, before, count + 1)
    try:
        yield
    finally:
        with lock:
            for key, one in kept.items():
                _, before, count = _lent.pop(key)
                if count > 1:
                    _lent[key] = (one, before, count - 1)
                else:
                    setattr(one, name, before)


@contextmanager
def attending(model: PreTrainedModel, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which a model, all of whose ``modules`` are given, runs our attention function."""
    configs = list(
        {
            id(config): config
            for module in modules
            for config in attention_configs(vars(module).get("config"))
        }.values()
    )
    with _lending(configs, ATTRIBUTE):
        if any(getattr(config, ATTRIBUTE) != TRAINING_ATTENTION for config in configs):
            model.set_attn_implementation(TRAINING_ATTENTION)
        with _checkpointed(
            modules,
            [config for config in configs if getattr(config, ATTRIBUTE) == TRAINING_ATTENTION],
        ):
            yield


def attention_configs(config: Any) -> Iterator[Any]:
    """A model configuration and those inside it, as far as they name an attention function."""
    if hasattr(config, ATTRIBUTE):
        yield config
        for name in getattr(config, "sub_configs", {}):
            yield from attention_configs(getattr(config, name, None))


@contextmanager
def _checkpointed(modules: Sequence[nn.Module], configs: Sequence[Any]) -> Iterator[None]:
    """Context in which layers that are checkpointed are recomputed later, in the backward pass,
    with the attention that they run with now."""
    name = "_gradient_checkpointing_func"
    modules = [
        module
        for module in modules
        if getattr(vars(module).get(name), "func", None) in (checkpoint, _checkpoint)
    ]
    with _lending(modules, name):
        for module in modules:
            func = getattr(module, name)
            if func.func is checkpoint:
                setattr(module, name, partial(_checkpoint, configs, func))
        yield


def _checkpoint(configs: Sequence[Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``func``, torch's checkpointing with its options, made to remember which calls of attention
    were watched."""
    keywords = {**getattr(func, "keywords", {}), **kwargs}
    if keywords.get("use_reentrant") and torch.is_grad_enabled():
        raise CaptureError(
            "reentrant gradient checkpointing computes the layers without gradients at first, so "
            "a penalty on them would have none; pass "
            "gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    if keywords.get("use_reentrant"):
        return func(*args, **kwargs)
    own = keywords.get("context_fn")

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        notes: list[bool] = []
        first, second = (nullcontext(), nullcontext()) if own is None else own()
        return _noting(first, notes), _Recomputing(second, notes, configs)

    return func(*args, **kwargs | {"context_fn": contexts})


@contextmanager
def _noting(own: AbstractContextManager[Any], notes: list[bool]) -> Iterator[None]:
    before, replay.notes = replay.notes, notes
    try:
        with own:
            yield
    finally:
        replay.notes = before


class _Recomputing:
    """Context of a recomputation, which torch may enter again for another backward pass."""

    def __init__(self, own: AbstractContextManager[Any], notes: list[bool], configs: Sequence[Any]):
        self._own, self._notes, self._configs = own, notes, configs

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._before, replay.script = replay.script, iter(self._notes)
        self._stack.enter_context(self._own)
        self._stack.enter_context(_lending(self._configs, ATTRIBUTE))
        for config in self._configs:
            setattr(config, ATTRIBUTE, TRAINING_ATTENTION)

    def __exit__(self, *error: Any) -> None:
        replay.script = self._before
        self._stack.__exit__(*error)
