"""What tests say on every page: random tensors and layers, closeness, refusals, and derivatives
against differences."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers import changed, normal
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError

PARTS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
"""What a layer is differentiated by."""


def normal_layer(
    seed: int, n: int, width: int, d: int, *, samples: int = 1, heads: int = 1, **more: Any
) -> Attention:
    """A float64 layer of normal numbers, keys as wide as values, without biases but for those
    given."""
    draw = normal(seed)
    weights = [draw(heads, width, d) for _ in range(3)]
    return Attention(draw(samples, n, width), *weights, **more)


def close(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 0.0) -> None:
    """Of one shape and dtype, and equal but for so much."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def near(found: Tensor, expected: Tensor, share: float) -> None:
    """Equal but for a share of the largest entry."""
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


def refused(call: Callable[[], Any], *words: str, error: type[Exception] = LipboundError) -> None:
    """A call ends in one sentence with all of these words."""
    with pytest.raises(error) as raised:
        call()
    said = str(raised.value)
    assert "\n" not in said
    assert [word for word in words if word not in said] == [], said


def script(path: Path) -> ModuleType:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given_parts(att: Attention) -> dict[str, Tensor]:
    """Those of `PARTS` that a layer has."""
    return {name: t for name in PARTS if (t := getattr(att, name)) is not None}


def gradients(f: Callable[[Attention], Tensor], att: Attention) -> tuple[Tensor, dict[str, Tensor]]:
    """f at a layer, and the derivatives of its sum by what the layer is made of."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given_parts(att).items()}
    value = f(changed(att, **leaves))
    found = torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
    return value.detach(), dict(zip(leaves, found, strict=True))


def slopes(
    f: Callable[[Attention], Tensor],
    att: Attention,
    *steps: float,
    seed: int = 1,
    reference: Callable[[Attention], Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Along a random direction of everything a layer is made of: the derivatives of all entries of
    f, and for each step their differences of fourth order, of f or of what f is compared with."""
    draw, given = normal(seed), given_parts(att)
    along = {name: t.abs().max() * draw(*t.shape).to(t) for name, t in given.items()}

    def moved(step: float) -> Attention:
        return changed(att, **{name: t + step * along[name] for name, t in given.items()})

    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    value = f(changed(att, **leaves)).flatten()
    each = torch.eye(len(value), dtype=value.dtype)
    found = torch.autograd.grad(
        value, list(leaves.values()), each, is_grads_batched=True, allow_unused=True
    )
    g, pairs = reference or f, zip(found, along.values(), strict=True)
    exact = sum((a * b).flatten(1).sum(1) for a, b in pairs if a is not None)
    differences = [
        (8 * (g(moved(h)) - g(moved(-h))) - (g(moved(2 * h)) - g(moved(-2 * h)))) / (12 * h)
        for h in steps
    ]
    return exact.detach(), *(t.detach().flatten() for t in differences)
