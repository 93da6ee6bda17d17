"""Arguments of a module with its tokens replaced."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lipbound.models.capture.seeing.call import Call


def replaced(call: Call, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the layer's arguments with its tokens replaced, in float64, and no cache."""
    given = call.given

    def double(value: Any) -> Any:
        if isinstance(value, Tensor) and (value is given or same_values(value, given)):
            # some modules are given copies for queries, keys and values
            return (x.transpose(0, 1) if call.tokens_first else x).reshape(value.shape)
        if isinstance(value, Cache):
            return None
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128)
        return type(value)(map(double, value)) if type(value) in (tuple, list) else value

    kwargs = {name: double(value) for name, value in call.run.kwargs.items()}
    return tuple(map(double, call.run.args)), kwargs


def same_values(a: Any, b: Any) -> bool:
    """Return whether two tensors, tuples or numbers are equal; other objects count as equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, Tensor | int | float | None) or isinstance(b, Tensor | int | float | None):
        return type(a) is type(b) and a == b
    return True


def filled(rows: Tensor, samples: int, n: int) -> Tensor:
    """Return rows, (at most samples N, D), as tokens (samples, N, D), the rest zero."""
    tokens = rows.new_zeros(samples * n, rows.shape[1])
    tokens[: len(rows)] = rows
    return tokens.view(samples, n, -1)
