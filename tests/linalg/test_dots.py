"""Inner products in two stages: never further off than is said."""

from fractions import Fraction

import pytest
import torch

from lipbound.linalg.enclosures.inner_products import Dots


@pytest.mark.parametrize("n", [1, 2, 7, 97, 256, 4096])
def test_errors_stay_within_what_is_said(n: int) -> None:
    g, dots = torch.Generator().manual_seed(n), Dots(n)
    x, z = (
        torch.randn(2, n, generator=g, dtype=torch.float64),
        torch.randn(2, 3, n, generator=g, dtype=torch.float64),
    )
    z[:, 0] = x.flip(1) * torch.tensor([1.0, -1.0]).repeat(n)[:n]  # large terms that cancel
    found = dots(x, z)
    for b in range(2):
        for r in range(3):
            exact = sum(
                (
                    Fraction(s) * Fraction(t)
                    for s, t in zip(x[b].tolist(), z[b, r].tolist(), strict=True)
                ),
                Fraction(0),
            )
            error, size = (
                abs(float(Fraction(float(found[b, r])) - exact)),
                float(x[b].norm() * z[b, r].norm()),
            )
            assert error <= dots.roundings * size
    torch.testing.assert_close(dots.gram(z), z @ z.mT)
    assert dots.roundings <= (n + 3) * 2.0**-53
    assert n != 4096 or dots.roundings == (64 + 64 + 2) * 2.0**-53
