"""MLPs and normalisations around an input, against autograd's dense Jacobians at many points of the ball."""

import pytest
import torch
from support.strategies import part as so_many
from torch import Tensor

from lipbound.analysis.sublayers import normalisation
from lipbound.analysis.sublayers.activations import ACTIVATIONS
from lipbound.analysis.sublayers.token_mlp import TokenMLP
from lipbound.attention.layer_norm import Normaliser


def mlp(seed: int, gated: bool, activation: int, tokens: int = 3, width: int = 4, hidden: int = 7) -> TokenMLP:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    gate = (draw(hidden, width), draw(hidden)) if gated else None
    return TokenMLP(draw(tokens, width), draw(hidden, width), draw(hidden), draw(width, hidden), ACTIVATIONS[activation], gate)


def value(part: TokenMLP, y: Tensor) -> Tensor:
    hidden = part.activation.value(y @ part.inner.mT + part.bias)
    if part.gate is not None:
        hidden = hidden * (y @ part.gate[0].mT + part.gate[1])
    return hidden @ part.outer.mT


def jacobians(part: TokenMLP, y: Tensor) -> Tensor:
    return torch.stack([torch.autograd.functional.jacobian(lambda t: value(part, t), one) for one in y])


def moves(tokens: int, width: int, count: int, seed: int) -> Tensor:
    """Moves of length 1 for every token."""
    move = torch.randn(count, tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return move / move.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=[one.name for one in ACTIVATIONS])
def test_products_and_norm_of_an_mlp(activation: int, gated: bool) -> None:
    part = mlp(activation, gated, activation)
    dense = jacobians(part, part.y)
    v = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(part.jvp(v), (dense @ v[..., None])[..., 0])
    torch.testing.assert_close(part.vjp(v), (dense.mT @ v[..., None])[..., 0])
    torch.testing.assert_close(part.norm(), torch.linalg.matrix_norm(dense, 2).amax(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)), ids=[one.name for one in ACTIVATIONS])
def test_no_point_of_the_ball_changes_an_mlp_more(activation: int, gated: bool) -> None:
    """Per case 3 radii x 60 points (of `make test` 12) x 3 tokens."""
    part = mlp(activation, gated, activation)
    here = jacobians(part, part.y)
    for radius in (1e-3, 0.1, 2.0):
        most = float(part.change(radius))
        for move in moves(3, 4, so_many(60, 12), activation):
            there = jacobians(part, part.y + radius * move)
            assert float(torch.linalg.matrix_norm(there - here, 2).amax()) <= most
    assert float(part.change(0.0)) <= (1e-9 if part.activation.name != "relu" else 100)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_no_point_of_the_ball_changes_a_normalisation_more(centred: bool, eps: float) -> None:
    """Per case 4 radii x 200 points x 3 tokens, some of them along the token."""
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(1, 3, 5, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
    around = Normaliser(x, weight, eps=eps, centred=centred)

    def dense(at: Tensor) -> Tensor:
        there = Normaliser(at, weight, eps=eps, centred=centred)
        eye = torch.eye(5, dtype=torch.float64)
        return torch.stack([there.jvp(e.expand(1, 3, 5))[0] for e in eye], -1)

    here, points = dense(x), moves(3, 5, 200, 4)
    points = torch.cat([points, -x / x.norm(dim=-1, keepdim=True), x / x.norm(dim=-1, keepdim=True)])
    length = float(around.size.amin()) * 5**0.5
    for radius in (1e-3 * length, 0.3 * length, 0.95 * length, 3 * length):
        change, steepest = float(normalisation.change(around, radius)), float(normalisation.norm_within(around, radius))
        for move in points:
            there = dense(x + radius * move)
            assert float(torch.linalg.matrix_norm(there - here, 2).amax()) <= change
            assert float(torch.linalg.matrix_norm(there, 2).amax()) <= steepest
    assert float(normalisation.change(around, 0.0)) == 0


def test_the_change_of_a_normalisation_is_the_second_derivative_for_small_radii() -> None:
    """Within a tenth of what the worst of many directions finds, for even weights."""
    x = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    around = Normaliser(x, torch.ones(4, dtype=torch.float64), centred=False)
    radius = 1e-4

    def dense(at: Tensor) -> Tensor:
        there = Normaliser(at, around.weight, centred=False)
        return torch.stack([there.jvp(e.expand(1, 1, 4))[0, 0] for e in torch.eye(4, dtype=torch.float64)], -1)

    found = max(float(torch.linalg.matrix_norm(dense(x + radius * move[None]) - dense(x), 2)) for move in moves(1, 4, 500, 6))
    assert found <= float(normalisation.change(around, radius)) <= 1.1 * found
