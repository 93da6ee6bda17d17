"""Attention as small modules write it, and the norms of heads by autograd through any module."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipbound as lb

Heads = Callable[[Tensor], Tensor]
"""A function from tokens to outputs of heads, (..., heads, d_v)."""
sdpa = F.scaled_dot_product_attention


def split(t: Tensor, heads: int = 4) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(2)


def norms(heads: Heads, x: Tensor) -> Tensor:
    """Largest singular values of the dense Jacobians of heads."""
    jacobian = torch.autograd.functional.jacobian(heads, x.detach(), vectorize=True)
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
    """Arguments that a module is given in a plain pass (the last time), by name, without caches."""
    module, found = model.get_submodule(name), []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    arguments = dict(found[-1])
    caches = {"past_key_values", "layer_past", "cache"}
    arguments |= arguments.pop("kwargs", {})
    return arguments | dict.fromkeys(caches & arguments.keys())


PROJECTIONS = set("c_proj dense linear_out o o_a_proj o_proj out out_lin out_proj Wo".split())
"""What modules call the projection of their heads' outputs."""


def own_norms(model: nn.Module, name: str, inputs: Any, att: Any, sample: int = 0) -> Tensor:
    """Norms of the heads of a captured module's own eager pass at a sample (or window), whose
    tokens alone move, without its padding, by autograd."""
    for part in ("attn", "experts"):  # torch's grouped product of experts knows no float64
        getattr(model, f"set_{part}_implementation", str)("eager")
    given, module = given_to(model, name, inputs), model.get_submodule(name)
    owner = next((part for place, part in module.named_modules() if place in PROJECTIONS), None)
    tensors = [key for key, t in given.items() if isinstance(t, Tensor) and t.ndim == 3]
    memory = next((k for k in tensors if k in ("key_value_states", "encoder_hidden_states")), "")
    crossed, count = att.perturbed == "memory", int(att.lengths[sample])
    x = given[memory if crossed else tensors[0]]

    def run(first: Tensor) -> Any:
        moved = x.detach().clone()
        moved[sample, :count] = first
        return module(**{key: moved if t is x else t for key, t in given.items()})

    def of_heads(first: Tensor) -> Tensor:
        made = before(owner, run, 1)(first) if owner else run(first)[0]
        return made[sample, : None if crossed else count].flatten(1).unflatten(-1, (att.heads, -1))

    return norms(of_heads, x[sample, :count])


def check(
    att: Any, expected: Tensor, *, rtol: float, sample: int | slice = 0, **options: Any
) -> None:
    """Compare exact norms of a sample, or of several, with those that are expected."""
    found = lb.spectral_norm(att, **{"tol": 1e-9, **options}).lower[sample]
    found = found.reshape(expected.shape)
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=0)


class QKV(nn.Module):
    """Queries, keys and values by linear maps, and a map of the outputs of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.many = heads

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(split(f(x), self.many) for f in (self.q, self.k, self.v))


class Maps(nn.Module):
    """Linear maps, by name, and one of the outputs of heads."""

    def __init__(self, wide: int, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, size in {**sizes, "out": (wide, 24)}.items():
            self.add_module(name, nn.Linear(*size))


def maps(wide: int = 24, **sizes: tuple[int, int]) -> Callable[..., Callable[[], nn.Module]]:
    """Make what builds modules with such maps of the function that is their forward pass."""

    def made(forward: Callable[..., Tensor]) -> Callable[[], nn.Module]:
        return partial(type(forward.__name__, (Maps,), {"forward": forward}), wide, **sizes)

    return made
