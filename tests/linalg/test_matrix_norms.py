"""Norms of matrices, and the largest deviation of a row of attention: never below the norm, and
hardly above, at any size."""

import math
from decimal import Decimal

import pytest
import torch
from support.checks import close, normal
from support.layers import random_attention
from support.mp_oracle import exactly

import lipbound as lb
from lipbound.devices import finished
from lipbound.linalg.covariance import weighted_deviation_norm
from lipbound.linalg.matrix_norms import (
    at_most,
    block_norm,
    matrix_norm,
    nonnegative_norm,
    powers,
    reproducible_float32,
    symmetric_norm,
    upper_factor,
)


def upper(value: torch.Tensor, exact: torch.Tensor, above: float, lost: float = 1e-15) -> None:
    assert bool((value >= exact * (1 - lost)).all())
    assert bool((value <= exact * (1 + above)).all())


def norms(m: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_norm(m.double(), 2)


@pytest.mark.parametrize("shape", [(3, 20, 4), (3, 4, 20), (5, 5), (1, 7), (7, 1)])
def test_matrix_norm_is_an_upper_value(shape: tuple[int, ...]) -> None:
    w = normal()(*shape)
    upper(matrix_norm(w), norms(w), 1e-12, 0.0)


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("size", [1e-120, 1.0, 1e120])
def test_at_most_says_yes_above_the_largest_eigenvalue_alone(n: int, size: float) -> None:
    g, zero = normal()(4, n, n), torch.zeros(4).double()
    g = (g + g.mT) * size
    top = torch.linalg.eigvalsh(g)[:, -1].abs() + size
    # whose largest eigenvalue is top
    g = g + (top - torch.linalg.eigvalsh(g)[:, -1])[:, None, None] * torch.eye(n).double()
    assert bool(at_most(g, top * (1 + 1e-9)).all())
    for wrong in (at_most(g, top * (1 - 1e-9)), at_most(g, zero), at_most(g * torch.nan, top)):
        assert not bool(wrong.any())


def test_at_most_of_zeros_and_beyond_the_range() -> None:
    zero = torch.zeros(2, 3, 3).double()
    assert at_most(zero, torch.tensor([0.0, -1.0]).double()).tolist() == [True, False]
    beyond = torch.tensor([torch.nan, -torch.inf]).double()
    assert not bool(at_most(zero + torch.eye(3).double(), beyond).any())


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nonnegative_norm_is_an_upper_value(spread: float, lower: bool, dtype: torch.dtype) -> None:
    scores = spread * normal()(4, 3, 50, 50)
    if lower:
        scores = scores.masked_fill(torch.ones(50, 50).triu(1) > 0, -torch.inf)
    p = torch.softmax(scores, -1).to(dtype)
    upper(nonnegative_norm(p), norms(p), 2e-6)


def test_nonnegative_norms_of_empty_rows_tiny_and_huge_entries() -> None:
    p = torch.softmax(normal()(1, 6, 6), -1)
    p[:, :, 4:] = p[:, 4:] = 0
    close(nonnegative_norm(p), norms(p), 1e-5)
    assert float(nonnegative_norm(torch.zeros(3, 3))) == pytest.approx(0, abs=1e-6)
    for size in (1e-170, 1e-300, 1e160):
        norm = nonnegative_norm(torch.full((3, 3), size, dtype=torch.float64))
        assert 3 * size <= float(norm) <= 3 * size * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(500, 5, 9), (50, 32, 32), (7, 1, 3), (3, 64, 20)])
@pytest.mark.parametrize("size", [1e-150, 1.0, 1e100])
@pytest.mark.parametrize("squarings", [0, 2, 4])
def test_block_norm_is_an_upper_value(shape: tuple[int, ...], size: float, squarings: int) -> None:
    b = normal()(*shape) * size
    b[0] = 0
    b[1] = b[1, :, :1] @ b[1, :1] / size  # rank one
    exact, value = norms(b), block_norm(b, squarings=squarings)
    upper(value, exact, {0: 0.5, 2: 0.06, 4: 0.02}[squarings])
    assert float(value[0]) == 0
    assert float(value[1]) == pytest.approx(float(exact[1]), rel=2e-3)  # room for float32 products


def test_symmetric_norm() -> None:
    b = normal()(4, 6, 3)
    close(symmetric_norm(b @ b.mT), norms(b) ** 2, 1e-12)
    assert float(symmetric_norm(torch.zeros(2, 2))) == 0


@pytest.mark.parametrize("spread", [0.0, 1e-12, 1e-6, 0.1, 8.0])
@pytest.mark.parametrize("n", [1, 2, 7, 150])
@pytest.mark.parametrize("size", [1e-280, 1.0, 1e280])
def test_powers_are_never_below_the_largest_eigenvalue(spread: float, n: int, size: float) -> None:
    q = torch.linalg.qr(normal()(3, n, n)).Q
    values = (-spread * torch.arange(n).double()).exp()
    g = (q * values) @ q.mT
    g[2, :, 0] = g[2, 0] = 0  # no longer of full rank
    exact = torch.linalg.eigvalsh(g)[:, -1]
    trace = g.diagonal(dim1=-2, dim2=-1).sum(-1)
    for rounds, excess in ((2, math.log(n) / 2**13 * 1.01), (4, 3e-7)):
        value, power = powers(g * size, rounds)
        assert bool((value / size >= exact - 2 * (n + 12) * 2.0**-53 * trace).all())
        assert bool((value / size <= exact * (1 + excess) + 1e-12 * trace).all())
    column = power[0, :, power[0].diagonal().argmax()]
    assert (
        n == 1
        or spread < 0.1
        or float(torch.cosine_similarity(column, q[0, :, 0], 0)) ** 2 > 1 - 1e-12
    )


def test_powers_of_zeros_and_of_what_is_not_finite() -> None:
    assert float(powers(torch.zeros(3, 3).double())[0]) == 0
    assert bool(powers(torch.full((2, 2), torch.nan).double())[0].isnan())


@pytest.mark.parametrize("delta", [0.0, 1e-12, 1e-9, 1e-8, 1e-6])
@pytest.mark.parametrize("k", [2, 16, 64])
def test_block_norm_of_nearly_orthogonal_matrices(k: int, delta: float) -> None:
    q, sigma = torch.linalg.qr(normal()(2, k, k)).Q, torch.ones(k, dtype=torch.float64)
    sigma[0] += delta
    assert float(block_norm((q[0] * sigma) @ q[1])) >= (1 + delta) * (1 - 1e-14)


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-295])
def test_block_norm_at_the_end_of_the_range(size: float) -> None:
    value = block_norm(torch.full((2, 3, 4), size, dtype=torch.float64))
    assert bool(((value >= size * 12**0.5) & (value <= size * 4)).all())


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-36, 1e-39, 1e-45])
@pytest.mark.parametrize("by_column", [False, True])
def test_block_norm_of_float32_matrices(size: float, by_column: bool) -> None:
    b = torch.cat([normal()(5, 6, 4), torch.zeros(1, 6, 4)]).float() * size
    b = b.mT.contiguous().mT if by_column else b
    upper(block_norm(b), norms(b), 0.03 if size > 1e-37 else 24**0.5 * 1.001 - 1, 0.0)
    assert float(block_norm(b)[-1]) == 0


def test_coarser_float32_products_are_noticed() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not reproducible_float32()
    finally:
        torch.set_float32_matmul_precision(before)
    assert reproducible_float32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not reproducible_float32()


@pytest.mark.parametrize("subnormal", [5e-324, 1e-320, 1e-310, 1e-300, 1e-100])
def test_one_subnormal_probability_does_not_blow_it_up(subnormal: float) -> None:
    x = random_attention("plain").x[:1, :2]
    p = torch.tensor([[1.0, subnormal], [subnormal, 1.0]], dtype=torch.float64)[None, None]
    pairs = list(zip(*x[0].tolist(), strict=True))
    with exactly(60):  # of two tokens: sqrt(2) p (1 - p) |x_1 - x_2|
        apart = sum((Decimal(a) - Decimal(b)) ** 2 for a, b in pairs).sqrt()
        exact = Decimal(2).sqrt() * Decimal(subnormal) * (1 - Decimal(subnormal)) * apart
    found = float(finished(weighted_deviation_norm(x, p)))
    assert float(exact) <= found <= float(exact) * (1 + 1e-12) + 1e-149


@pytest.mark.parametrize("gap", [700.0, 740.0, 744.0, 745.0])
def test_the_bound_is_its_formula_there(gap: float) -> None:
    # two orthogonal tokens that attend to themselves by a margin of gap: ||J|| <= ||W_V|| (||P|| +
    # 2 max ||X^T M|| ||X|| ||A||), all ones but A and M
    eye = torch.eye(2, dtype=torch.float64)
    att = lb.Attention(eye[None], gap * eye[None], eye[None], eye[None], scale=1.0)
    assert float(lb.bounds.get("yudin_sqrt_n")(att)) == pytest.approx(1.0, rel=1e-6)
    assert float(lb.bounds.get("yudin_sqrt_n")(att)) >= 1


@pytest.mark.parametrize(("m", "n"), [(2, 1), (10, 3), (41, 40), (300, 24)])
@pytest.mark.parametrize("size", [1e-100, 1.0, 1e60])
def test_small_factors_are_above_by_next_to_nothing(m: int, n: int, size: float) -> None:
    draw, falling = normal(), 10.0 ** -torch.linspace(0, 40, n).double()
    w, low = draw(m, n), draw(m, 1) @ draw(1, n)
    equal, zero = torch.ones_like(w), torch.zeros_like(w)
    w = torch.stack([w, low, w * falling, w * falling[0], equal, equal * falling, zero]) * size
    f, excess = upper_factor(w)
    squares = w.square().sum((-1, -2))
    assert bool((excess <= 1e-10 * squares).all())  # each of them proved
    above = f.mT @ f - w.mT @ w
    least = torch.linalg.eigvalsh(above / squares.clamp_min(1e-300)[:, None, None])
    assert bool((least[:-1] > 0).all())
    assert bool((least <= (excess / squares.clamp_min(1e-300))[:, None]).all())
    assert not bool(f[-1].any())
