import pytest
import torch

from lipbound.linalg.matrix_norms import (
    at_most,
    block_norm,
    matrix_norm,
    nonnegative_norm,
    reproducible_float32,
    symmetric_norm,
)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 20, 4), (3, 4, 20), (5, 5), (1, 7), (7, 1)])
def test_matrix_norm_is_an_upper_value(shape: tuple[int, ...]) -> None:
    w = draw(*shape)
    exact = torch.linalg.matrix_norm(w, 2)
    assert bool((matrix_norm(w) >= exact).all())
    torch.testing.assert_close(matrix_norm(w), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("size", [1e-120, 1.0, 1e120])
def test_at_most_says_yes_above_the_largest_eigenvalue_alone(n: int, size: float) -> None:
    g = draw(4, n, n)
    g = (g + g.mT) * size
    top = torch.linalg.eigvalsh(g)[:, -1].abs() + size
    # whose largest eigenvalue is top
    g = g + (top - torch.linalg.eigvalsh(g)[:, -1])[:, None, None] * torch.eye(n).double()
    assert bool(at_most(g, top * (1 + 1e-9)).all())
    assert not bool(at_most(g, top * (1 - 1e-9)).any())
    assert not bool(at_most(g, torch.zeros(4).double()).any())
    assert not bool(at_most(g * torch.nan, top).any())


def test_at_most_of_zeros_and_beyond_the_range() -> None:
    zero = torch.zeros(2, 3, 3).double()
    assert at_most(zero, torch.tensor([0.0, -1.0]).double()).tolist() == [True, False]
    assert not bool(
        at_most(zero + torch.eye(3).double(), torch.tensor([torch.nan, -torch.inf]).double()).any()
    )


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, 300.0])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nonnegative_norm_is_an_upper_value(spread: float, lower: bool, dtype: torch.dtype) -> None:
    scores = spread * draw(4, 3, 50, 50)
    if lower:
        scores = scores.masked_fill(torch.ones(50, 50).triu(1) > 0, -torch.inf)
    p = torch.softmax(scores, -1).to(dtype)
    exact = torch.linalg.matrix_norm(p.double(), 2)
    value = nonnegative_norm(p)
    assert bool((value >= exact * (1 - 1e-15)).all())
    torch.testing.assert_close(value, exact, rtol=2e-6, atol=0)


def test_nonnegative_norm_with_empty_rows_and_columns() -> None:
    p = torch.softmax(draw(1, 6, 6), -1)
    p[:, :, 4:] = 0
    p[:, 4:] = 0
    torch.testing.assert_close(
        nonnegative_norm(p), torch.linalg.matrix_norm(p, 2), rtol=1e-5, atol=0
    )
    assert float(nonnegative_norm(torch.zeros(3, 3))) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shape", [(500, 5, 9), (50, 32, 32), (7, 1, 3), (3, 64, 20)])
@pytest.mark.parametrize("size", [1e-150, 1.0, 1e100])
@pytest.mark.parametrize("squarings", [0, 2, 4])
def test_block_norm_is_an_upper_value(shape: tuple[int, ...], size: float, squarings: int) -> None:
    b = draw(*shape) * size
    b[0] = 0
    b[1] = b[1, :, :1] @ b[1, :1] / size  # rank one
    exact = torch.linalg.matrix_norm(b, 2)
    value = block_norm(b, squarings=squarings)
    assert bool((value >= exact * (1 - 1e-15)).all())
    assert bool((value <= exact * (1.5, 1, 1.06, 1, 1.02)[squarings]).all())
    assert float(value[0]) == 0
    assert float(value[1]) == pytest.approx(float(exact[1]), rel=2e-3)  # room for float32 products


def test_symmetric_norm() -> None:
    b = draw(4, 6, 3)
    torch.testing.assert_close(
        symmetric_norm(b @ b.mT), torch.linalg.matrix_norm(b, 2) ** 2, rtol=1e-12, atol=0
    )
    assert float(symmetric_norm(torch.zeros(2, 2))) == 0


@pytest.mark.parametrize("delta", [0.0, 1e-12, 1e-9, 1e-8, 1e-6])
@pytest.mark.parametrize("k", [2, 16, 64])
def test_block_norm_of_nearly_orthogonal_matrices(k: int, delta: float) -> None:
    q = torch.linalg.qr(draw(2, k, k)).Q
    sigma = torch.ones(k, dtype=torch.float64)
    sigma[0] += delta
    b = (q[0] * sigma) @ q[1]
    assert float(block_norm(b)) >= (1 + delta) * (1 - 1e-14)


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-295])
def test_block_norm_at_the_end_of_the_range(size: float) -> None:
    value = block_norm(torch.full((2, 3, 4), size, dtype=torch.float64))
    assert bool((value >= size * 12**0.5).all())
    assert bool((value <= size * 4).all())


@pytest.mark.parametrize("size", [1.0, 1e30, 1e-36, 1e-39, 1e-45])
@pytest.mark.parametrize("by_column", [False, True])
def test_block_norm_of_float32_matrices(size: float, by_column: bool) -> None:
    b = torch.cat([draw(5, 6, 4), torch.zeros(1, 6, 4)]).float() * size
    b = b.mT.contiguous().mT if by_column else b
    exact, value = torch.linalg.matrix_norm(b.double(), 2), block_norm(b)
    assert bool((value >= exact).all())
    assert bool((value <= exact * (1.03 if size > 1e-37 else 24**0.5 * 1.001)).all())
    assert float(value[-1]) == 0


def test_nonnegative_norms_of_tiny_and_huge_entries() -> None:
    for size in (1e-170, 1e-300, 1e160):
        norm = nonnegative_norm(torch.full((3, 3), size, dtype=torch.float64))
        assert 3 * size <= float(norm) <= 3 * size * (1 + 1e-6)


def test_coarser_float32_products_are_noticed() -> None:
    assert reproducible_float32()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not reproducible_float32()
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not reproducible_float32()
