"""Derivatives of activation functions against autograd, their ranges against dense grids."""

import mpmath as mp
import pytest
import torch

from lipbound.analysis.sublayers.activations import ACTIVATIONS, SILU_TURN, TANH_GELU_TURN, Activation

ids = [one.name for one in ACTIVATIONS]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids)
def test_slopes_are_those_of_autograd(activation: Activation) -> None:
    z = torch.linspace(-9, 9, 997, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(activation.value(z).sum(), z)
    away = z.detach().abs() > 1e-9  # a jump
    torch.testing.assert_close(activation.slope(z.detach())[away], slope[away], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=ids)
def test_ranges_hold_a_dense_grid_and_are_attained(activation: Activation) -> None:
    g = torch.Generator().manual_seed(0)
    z, reach = 3 * torch.randn(200, generator=g, dtype=torch.float64), torch.rand(200, generator=g, dtype=torch.float64) * 3
    least, most = activation.slopes(z, reach)
    grid = activation.slope(z[:, None] + reach[:, None] * torch.linspace(-1, 1, 20001, dtype=torch.float64))
    assert bool((least <= grid.amin(1)).all())
    assert bool((grid.amax(1) <= most).all())
    torch.testing.assert_close(least, grid.amin(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(most, grid.amax(1), rtol=0, atol=1e-6)
    change = activation.slope_change(z, reach)
    assert bool(((grid - activation.slope(z)[:, None]).abs().amax(1) <= change).all())


def test_a_jump_counts_from_both_sides() -> None:
    relu = next(one for one in ACTIVATIONS if one.name == "relu")
    z = torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64)
    assert relu.slope_change(z, torch.tensor(1e-12, dtype=torch.float64)).tolist() == pytest.approx([1, 0, 0], abs=1e-11)
    assert relu.slope_change(z, torch.tensor(1.5, dtype=torch.float64)).tolist() == pytest.approx([1, 1, 1], abs=1e-12)


def test_derivatives_turn_where_it_is_said() -> None:
    """To thirty digits."""
    with mp.workdps(30):
        assert abs(mp.mpf(SILU_TURN) * mp.tanh(mp.mpf(SILU_TURN) / 2) - 2) < 1e-14
        c = mp.sqrt(2 / mp.pi)
        found = mp.findroot(lambda z: mp.diff(lambda t: t / 2 * (1 + mp.tanh(c * (t + mp.mpf("0.044715") * t**3))), z, 2), 1.41)
        assert abs(found - mp.mpf(TANH_GELU_TURN)) < 1e-14
