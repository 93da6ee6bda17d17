"""What modules keep from pass to pass (caches, counters, moving averages), put back as it was."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

DEEP = 6
"""Lists, dictionaries and objects inside each other that are looked into."""
TORCHS = {*vars(nn.Module())} - {"_buffers"}
"""Attributes that every module has; what changes them changes the model."""
STILL = (type, nn.Module, nn.Parameter, PreTrainedConfig, str, int, float)
"""Kinds of values that are not looked into."""


@contextmanager
def unmoved(module: nn.Module, given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Yield while a module runs; what it and its inputs keep is afterwards as it was before.

    Args:
        module: that runs.
        given: its inputs, a cache among them perhaps.
    """
    # stand-ins of ours keep what they are given, to be read afterwards
    parts = [m for m in module.modules() if not type(m).__module__.startswith("lipbound.")]
    owns = [{k: v for k, v in vars(m).items() if not _is_torchs(k)} for m in parts]
    before: list[tuple[Any, Any]] = [
        (one, one.detach().clone() if isinstance(one, Tensor) else _contents(one))
        for one in _inside([given, *map(dict, owns)]).values()
    ]
    versions = [t._version if isinstance(t, Tensor) else 0 for t, _ in before]
    try:
        yield
    finally:
        for part, own in zip(parts, owns, strict=True):
            for name in [n for n in vars(part) if n not in own and not _is_torchs(n)]:
                del vars(part)[name]
            vars(part).update(own)
        for (one, old), version in zip(before, versions, strict=True):
            if isinstance(one, list | dict | set | deque):
                now = _contents(one)
                if len(now) == len(old) and all(map(is_, now, old)):
                    continue
                one.clear()
                fill = one.extend if isinstance(one, list | deque) else one.update
                fill(zip(old[::2], old[1::2], strict=True) if isinstance(one, dict) else old)
            elif isinstance(one, Tensor) and one._version != version:
                with torch.no_grad():
                    one.copy_(old)


def copied_cache(value: Any, made: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """Return a copy of a cache, to which a pass adds, with what is made of its tensors."""
    tensors = [t for t in _inside(value).values() if isinstance(t, Tensor)]
    return copy.deepcopy(value, {id(t): made(t.detach()) for t in tensors})


def _contents(one: Any) -> list[Any]:
    """Return what is in a list or a set, or keys and values in turn."""
    return [*chain(*one.items())] if isinstance(one, dict) else [*one]


def _is_torchs(name: str) -> bool:
    return name in TORCHS or name.startswith("_hf_")  # Accelerate keeps all weights there


def _inside(value: Any) -> dict[int, Any]:
    """Return the tensors, lists, dictionaries and sets in a value, by their identities."""
    found: dict[int, Any] = {}

    def look(one: Any, depth: int) -> None:
        if isinstance(one, STILL) or callable(one) or not depth or id(one) in found:
            return
        if isinstance(one, Tensor):
            found.update({} if one.is_meta or one.is_inference() else {id(one): one})
        elif isinstance(one, list | tuple | dict | set | deque):
            found[id(one)] = one
            for each in [*one.values()] if isinstance(one, dict) else [*one]:
                look(each, depth - 1)
        elif hasattr(one, "__dict__"):
            look(vars(one), depth)

    look(value, DEEP)
    return found
