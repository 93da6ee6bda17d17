"""The largest deviation of a row of attention where probabilities are subnormal,
against 60 digits."""

from decimal import Decimal

import pytest
import torch
from support.layers import random_attention
from support.mp_oracle import exactly

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.linalg.covariance import weighted_deviation_norm


@pytest.mark.parametrize("subnormal", [5e-324, 1e-320, 1e-310, 1e-300, 1e-100])
def test_one_subnormal_probability_does_not_blow_it_up(subnormal: float) -> None:
    x = random_attention("plain").x[:1, :2]
    p = torch.tensor([[1.0, subnormal], [subnormal, 1.0]], dtype=torch.float64)[None, None]
    pairs = list(zip(*x[0].tolist(), strict=True))
    with exactly(60):  # of two tokens: sqrt(2) p (1 - p) |x_1 - x_2|
        apart = sum((Decimal(a) - Decimal(b)) ** 2 for a, b in pairs).sqrt()
        exact = Decimal(2).sqrt() * Decimal(subnormal) * (1 - Decimal(subnormal)) * apart
    found = float(weighted_deviation_norm(x, p))
    assert float(exact) <= found <= float(exact) * (1 + 1e-12) + 1e-149


@pytest.mark.parametrize("gap", [700.0, 740.0, 744.0, 745.0])
def test_the_bound_is_its_formula_there(gap: float) -> None:
    # two orthogonal tokens that attend to themselves by a margin of gap: ||J|| <= ||W_V|| (||P|| +
    # 2 max ||X^T M|| ||X|| ||A||), all ones but A and M
    eye = torch.eye(2, dtype=torch.float64)
    att = Attention(eye[None], gap * eye[None], eye[None], eye[None], scale=1.0)
    assert float(bounds.get("yudin_sqrt_n")(att)) == pytest.approx(1.0, rel=1e-6)
    assert float(bounds.get("yudin_sqrt_n")(att)) >= 1
