"""Attention as small modules write it, and the norms of heads by autograd through any module."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Heads = Callable[[Tensor], Tensor]
"""A function from tokens to outputs of heads, (..., heads, d_v)."""
sdpa = F.scaled_dot_product_attention


def split(t: Tensor, heads: int = 4) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(2)


def norms(heads: Heads, x: Tensor) -> Tensor:
    """Largest singular values of the dense Jacobians of heads."""
    jacobian = torch.autograd.functional.jacobian(heads, x.detach())
    axis = jacobian.ndim - x.ndim - 2
    return torch.linalg.matrix_norm(jacobian.movedim(axis, 0).flatten(1, axis + 1).flatten(2), 2)


def before(projection: nn.Module, run: Callable[[Tensor], Any], heads: int = 4) -> Heads:
    """What a projection is given when tokens run, as outputs of heads."""

    def made(x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        run(x)
        hook.remove()
        return seen[0].unflatten(-1, (heads, -1))

    return made


def given_to(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments that a module is given in a plain pass, by name, without caches."""
    module, found = model.get_submodule(name), []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    arguments = dict(found[0])
    caches = {"past_key_values", "layer_past", "cache"}
    arguments |= arguments.pop("kwargs", {})
    return arguments | dict.fromkeys(caches & arguments.keys())
