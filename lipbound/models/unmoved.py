"""What modules keep from pass to pass (caches, counters, moving averages) stays as it is."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

DEEP = 6
"""Lists, dictionaries and objects inside each other that are copied."""
TORCHS = {*vars(nn.Module())} - {"_buffers"}
"""Attributes that every module has; what changes them changes the model."""
SHARED = (type, nn.Module, nn.Parameter, PretrainedConfig, str, int, float)
"""Kinds of values that are not copied."""


@contextmanager
def unmoved(module: nn.Module) -> Iterator[None]:
    """Yield while a module runs with copies of what it keeps, which are thrown away then."""
    # stand-ins of ours keep what they are given, to be read afterwards
    parts = [m for m in module.modules() if not type(m).__module__.startswith("lipbound.")]
    owns = [{k: v for k, v in vars(m).items() if not _is_torchs(k)} for m in parts]
    for part, copied in zip(parts, copied_state(owns), strict=True):
        vars(part).update(copied)
    try:
        yield
    finally:
        for part, own in zip(parts, owns, strict=True):
            for name in [n for n in vars(part) if n not in own and not _is_torchs(n)]:
                del vars(part)[name]
            vars(part).update(own)


def _is_torchs(name: str) -> bool:
    return name in TORCHS or name.startswith("_hf_")  # Accelerate keeps all weights there


def copied_state(value: Any, memo: dict[int, Any] | None = None, depth: int = DEEP) -> Any:
    """Return a value in which tensors, and what holds them, are copies, and all else is shared.

    Args:
        value: a cache, or attributes of modules.
        memo: originals and copies so far, by identities of the originals.
        depth: how deep to go.
    """
    memo = {} if memo is None else memo
    if id(value) in memo or not depth or isinstance(value, SHARED) or callable(value):
        return memo.get(id(value), (value, value))[1]
    new: Any = value
    with suppress(Exception):  # of what cannot be copied
        if isinstance(value, Tensor):
            new = value if value.is_meta else value.detach().clone()
        elif type(value) is tuple:
            return tuple(copied_state(one, memo, depth - 1) for one in value)
        elif isinstance(value, list | deque | dict | set) or hasattr(value, "__dict__"):
            new = copy.copy(value)
        memo[id(value)] = value, new
        held = new if isinstance(value, list | deque | dict) else getattr(new, "__dict__", {})
        if new is not value and not isinstance(value, Tensor):
            for key, one in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
                held[key] = copied_state(one, memo, depth - 1)
    return new
