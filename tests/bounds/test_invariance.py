"""What changes nothing of a Jacobian, or only its size, changes no enclosure and no bound: at any
size that the dtype has room for."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support import mp_oracle
from support.judge import METHODS, below
from support.layers import changed
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.jacobians.spectral_norm import spectral_norm

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)
MOST = {torch.float32: 60, torch.float64: 190}
"""Powers of two next to 1e18 and 1e57."""
NEAR = {torch.float32: 1e-5, torch.float64: 1e-9}
SIZES = (-1.0, -0.5, 0.5, 1.0)
NAMES = bounds.names()


def heads(dtype: torch.dtype, seed: int = 0) -> Attention:
    """2 samples x 2 heads with biases, none of it exceptional."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (2, 5, 4),
        "w_q": (2, 4, 3),
        "w_k": (2, 4, 3),
        "w_v": (2, 4, 2),
        "b_q": (2, 3),
        "b_k": (2, 3),
        "b_v": (2, 2),
    }
    return Attention(
        **{
            name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }
    )


@cache
def exact(dtype: torch.dtype, biased: bool) -> list[list[mp_oracle.Enclosed]]:
    return mp_oracle.norms(heads(dtype) if biased else heads(dtype).without_biases())


@cache
def plainly(name: str, dtype: torch.dtype, biased: bool) -> tuple[Tensor, Callable[[str], bool]]:
    """A bound on the layer itself, and whether it follows scales of 4."""
    att = heads(dtype) if biased else heads(dtype).without_biases()
    values = bounds.get(name)(att)

    @cache
    def follows(what: str) -> bool:
        return torch.allclose(
            bounds.get(name)(SCALED[what](att, 2)),
            values * unit(what) ** 2,
            rtol=NEAR[dtype],
            atol=0.0,
        )

    return values, follows


def unit(what: str) -> float:
    """What a Jacobian is multiplied by where the scale is 2."""
    return 2.0 if what == "values" else 1.0


def inputs_scaled(att: Attention, power: int) -> Attention:
    """x times s, projections of queries and keys over s, s a power of two: the same J."""
    return changed(att, x=att.x * 2.0**power, w_q=att.w_q * 2.0**-power, w_k=att.w_k * 2.0**-power)


def values_scaled(att: Attention, power: int) -> Attention:
    """Values and their biases times s: s J."""
    return changed(
        att, w_v=att.w_v * 2.0**power, b_v=None if att.b_v is None else att.b_v * 2.0**power
    )


SCALED: dict[str, Callable[[Attention, int], Attention]] = {
    "inputs": inputs_scaled,
    "values": values_scaled,
}


def permuted(att: Attention) -> Attention:
    return changed(att, x=att.x[:, torch.tensor([3, 0, 4, 2, 1])])


def keys_shifted(att: Attention) -> Attention:
    """By a bias of any size: softmax sees differences of keys alone."""
    return changed(att, b_k=1e4 * torch.ones_like(att.w_k[:, 0]))


def values_shifted(att: Attention) -> Attention:
    return changed(att, b_v=1e6 * torch.ones_like(att.w_v[:, 0]))


UNCHANGED = (permuted, keys_shifted, values_shifted)


def overlap(att: Attention, other: Attention, method: str, factor: float = 1.0) -> None:
    """Both enclose one number."""
    one, two = (spectral_norm(layer, method=method, tol=1e-4, delta=1e-6) for layer in (att, other))
    assert bool((one.lower * factor <= two.upper).all())
    assert bool((two.lower <= one.upper * factor).all())
    assert bool(two.converged.all())


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", SCALED)
@pytest.mark.parametrize("method", METHODS)
def test_enclosures_follow_scales(method: str, what: str, size: float, dtype: torch.dtype) -> None:
    att, power = heads(dtype), int(size * MOST[dtype])
    overlap(att, SCALED[what](att, power), method, 2.0**power if what == "values" else 1.0)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("change", UNCHANGED)
@pytest.mark.parametrize("method", METHODS)
def test_enclosures_do_not_see_what_attention_does_not(
    method: str, change: Callable[[Attention], Attention], dtype: torch.dtype
) -> None:
    overlap(heads(dtype), change(heads(dtype)), method)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("method", METHODS)
def test_enclosures_of_repeated_heads_are_the_same(method: str, dtype: torch.dtype) -> None:
    att = heads(dtype)
    twice = {
        name: getattr(att, name).repeat_interleave(2, 0)
        for name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v")
    }
    norm = spectral_norm(changed(att, **twice), method=method, tol=1e-4, delta=1e-6)
    assert bool((norm.lower[:, ::2] <= norm.upper[:, 1::2]).all())
    assert bool((norm.lower[:, 1::2] <= norm.upper[:, ::2]).all())


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", SCALED)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_follow_scales(name: str, what: str, size: float, dtype: torch.dtype) -> None:
    """A bound that follows a scale of 4 follows one of 1e57 (or, of a paper's, is infinite there);
    one that does not is a bound all the same."""
    bound, power = bounds.get(name), int(size * MOST[dtype])
    for biased in (True, False):
        att = heads(dtype) if biased else heads(dtype).without_biases()
        other = SCALED[what](att, power)
        values, follows = plainly(name, dtype, biased)
        found, sound = bound(other) * unit(what) ** -power, bound.sound(other)
        assert not bool(found.isnan().any())
        close = ((found - values).abs() <= NEAR[dtype] * values) | (
            found.isinf() & ("lipbound" not in name)
        )
        assert bool(close.all()) or not follows(what)
        if bound.map == "head":
            norms = [norm for row in exact(dtype, biased) for norm in row]
            wrong = [
                below(value, norm)
                for value, norm in zip(found.flatten().tolist(), norms, strict=True)
            ]
            assert [
                miss
                for miss, keep in zip(wrong, sound.flatten().tolist(), strict=True)
                if keep and miss
            ] == []


def test_most_bounds_follow_both_scales() -> None:
    """Else the test above says little."""
    for what in SCALED:
        following = [
            name for name in bounds.names() if plainly(name, torch.float64, False)[1](what)
        ]
        assert {"castin", "castin_c3", "yudin", "lipbound", "lipbound_block"} <= set(following)
