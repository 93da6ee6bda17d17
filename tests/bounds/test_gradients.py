"""Derivatives of the published bounds: against central differences, at kinks, and where rows
saturate."""

import pytest
import torch
from support.layers import changed, random_attention
from support.variants import layer as variant_layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention

PUBLISHED = [
    name for name in bounds.names() if bounds.get(name).citation != bounds.get("lipbound").citation
]
PARTS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v")


def leaves(att: Attention) -> dict[str, Tensor]:
    return {
        name: t.detach().clone().requires_grad_()
        for name in PARTS
        if (t := getattr(att, name)) is not None
    }


def gradients(att: Attention, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a bound over heads, and its derivative with respect to everything a layer is made
    of."""
    given = leaves(att)
    total = bounds.get(name)(changed(att, **given)).sum()
    return total.detach(), dict(
        zip(
            given,
            torch.autograd.grad(total, list(given.values()), materialize_grads=True),
            strict=True,
        )
    )


def slopes(att: Attention, name: str, seed: int, step: float = 1e-6) -> tuple[float, float, float]:
    """Along a random direction: the derivative, the central difference, and the value."""
    total, found = gradients(att, name)
    g = torch.Generator().manual_seed(seed)
    direction = {
        key: t.abs().max() * torch.randn(t.shape, generator=g, dtype=t.dtype)
        for key in found
        if (t := getattr(att, key)) is not None
    }
    moved = [
        changed(att, **{key: getattr(att, key) + sign * step * d for key, d in direction.items()})
        for sign in (1, -1)
    ]
    ahead, back = (float(bounds.get(name)(m).sum()) for m in moved)
    return (
        sum(float((found[key] * d).sum()) for key, d in direction.items()),
        (ahead - back) / (2 * step),
        float(total),
    )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("kind", ["plain", "biases", "causal", "padded", "flat", "one_token"])
def test_derivatives_of_published_bounds(kind: str, name: str) -> None:
    att = random_attention(kind)
    if (
        bounds.get(name)(att).isinf().any()
    ):  # the mean-field bound of steep heads: smaller ones have a number
        att = changed(att, w_q=0.01 * att.w_q)
    exact, difference, value = slopes(att, name, 1)
    assert exact == pytest.approx(difference, rel=1e-4, abs=1e-8 * value)


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if "rotation" in bounds.get(name).covers]
)
@pytest.mark.parametrize("has", [("rotation",), ("cap",), ("rotation", "cap")])
def test_derivatives_with_variants(has: tuple[str, ...], name: str) -> None:
    exact, difference, value = slopes(variant_layer(0, frozenset(has)), name, 2)
    assert exact == pytest.approx(difference, rel=1e-4, abs=1e-8 * value)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kind", ["sharp", "duplicates", "no_query", "equal", "saturated", "zero", "one_hot"]
)
def test_derivatives_are_finite_where_bounds_are(kind: str, dtype: torch.dtype, name: str) -> None:
    att = random_attention(
        kind if kind in ("sharp", "duplicates", "no_query") else "plain", dtype=dtype
    )
    other = {
        "equal": {"x": torch.ones_like(att.x)},
        "saturated": {"w_q": 300 * att.w_q},
        "one_hot": {"w_q": 1e5 * att.w_q},
        "zero": {"x": 0 * att.x, "w_v": 0 * att.w_v},
    }.get(kind, {})
    att = changed(att, **other)
    value, found = gradients(att, name)
    if bool(
        torch.isfinite(1e6 * value.to(dtype))
    ):  # what is finite in float64 alone has derivatives beyond the range of float32
        assert all(bool(torch.isfinite(t).all()) for t in found.values())


@pytest.mark.parametrize("name", ["castin", "castin_c3", "yudin", "yudin_sqrt_n", "yudin_closed"])
def test_at_a_kink_the_derivative_is_that_of_one_side(name: str) -> None:
    """Two tokens of the same length, farther out than all others: moving one of them outwards is
    seen in full, or not at all."""
    x = torch.zeros(1, 4, 3, dtype=torch.float64)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2], x[0, 3, 2] = 2.0, 2.0, 0.3, -0.4
    w = torch.eye(3, dtype=torch.float64)[None]
    att = Attention(x, w, w, w)
    _, found = gradients(att, name)
    step = 1e-6
    for token in (0, 1):
        direction = torch.zeros_like(x)
        direction[0, token, token] = 1.0
        value, ahead, back = (
            float(bounds.get(name)(changed(att, x=x + t * direction))) for t in (0.0, step, -step)
        )
        sides = sorted(((ahead - value) / step, (value - back) / step))
        slope = float((found["x"] * direction).sum())
        assert sides[0] - 1e-4 * abs(value) <= slope <= sides[1] + 1e-4 * abs(value)
