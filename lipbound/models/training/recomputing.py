"""Changing a model in training for a while, also where its layers are recomputed.

Gradient checkpointing computes layers again in the backward pass, when the context that changed the
model may have ended: the recomputation must do what the first pass did.
"""

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
from lipbound.models.capture.seeing.interface import ATTRIBUTE, attention_configs

TRAINING_ATTENTION = "lipbound-training"
"""Name in the transformers registry of the attention function that can keep its probabilities."""
CHECKPOINTING = "_gradient_checkpointing_func"
"""Where a module of transformers keeps the function that checkpoints it."""
lock = threading.RLock()
"""Held where what all threads share is changed."""


class RecomputationNotes(threading.local):
    """Notes on the attention calls of checkpointed layers, which their recomputation follows."""

    notes: list[bool] | None = None
    script: Iterator[bool] | None = None


replay = RecomputationNotes()

_lent: dict[tuple[int, str], tuple[Any, Any, int]] = {}
"""Attributes that contexts change: the object, the value before all of them, how many there are."""


@contextmanager
def _lending(objects: Iterable[Any], name: str) -> Iterator[None]:
    """Yield, and once all contexts that overlap have ended, set an attribute back."""
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
    """Yield while a model, all of whose ``modules`` are given, runs our attention function."""
    found = (c for module in modules for c in attention_configs(vars(module).get("config")))
    configs = list({id(config): config for config in found}.values())
    with _lending(configs, ATTRIBUTE):
        if any(getattr(config, ATTRIBUTE) != TRAINING_ATTENTION for config in configs):
            model.set_attn_implementation(TRAINING_ATTENTION)
        ours = [config for config in configs if getattr(config, ATTRIBUTE) == TRAINING_ATTENTION]
        with _checkpointed(modules, ours):
            yield


@contextmanager
def _checkpointed(modules: Sequence[nn.Module], configs: Sequence[Any]) -> Iterator[None]:
    """Yield while checkpointed layers that run will be recomputed with the attention of now."""
    known = (checkpoint, _checkpoint)
    modules = [m for m in modules if getattr(vars(m).get(CHECKPOINTING), "func", None) in known]
    with _lending(modules, CHECKPOINTING):
        for module in modules:
            func = getattr(module, CHECKPOINTING)
            if func.func is checkpoint:
                setattr(module, CHECKPOINTING, partial(_checkpoint, configs, func))
        yield


def _checkpoint(configs: Sequence[Any], func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what torch's checkpointing does, made to remember which attention was watched.

    Args:
        configs: of the model, that name our attention function.
        func: torch's checkpointing with its options.
        *args: of the layer.
        **kwargs: of the layer and of checkpointing.

    Raises:
        CaptureError: checkpointing is reentrant.
    """
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
