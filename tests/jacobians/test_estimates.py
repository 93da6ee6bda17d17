"""Norms without ``delta`` where float32 products, or the range of float64, cannot resolve them:
right, or not converged."""

import pytest
import torch
from support import hard_heads, mp_oracle
from support.layers import changed, random_attention

import lipbound as lb
from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians.maps import SIDE_OF
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.enclose import Problem, estimate
from lipbound.linalg.operators import JacobianOperator, Roundoff


def cancelling(seed: int, near: float) -> Attention:
    """Two heads in float32 whose outputs cancel but for ``near``."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    w_q, w_k, w_v, w_o = draw(1, 5, 3), draw(1, 5, 3), draw(1, 5, 3), draw(1, 3, 4)
    w_v = torch.cat([w_v, w_v * (1 + near * draw(1, 5, 3))])
    parts = (draw(1, 4, 5), w_q.repeat(2, 1, 1), w_k.repeat(2, 1, 1), w_v)
    return Attention(*(t.float() for t in parts), w_o=torch.cat([w_o, -w_o]).float())


@pytest.mark.parametrize("near", [1e-5, 1e-7])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_heads_that_cancel(seed: int, near: float) -> None:
    att = cancelling(seed, near)
    exact = mp_oracle.norms(att, "layer")[0][0].value
    norm = spectral_norm(att, map="layer")
    assert float(norm.lower) <= exact
    assert not bool(norm.converged) or float(norm.lower) >= exact * (1 - 3e-4)
    assert bool(norm.converged) or near < 1e-5  # float64 resolves what is left of eleven digits


def test_a_sink_that_leaves_nothing_in_float32() -> None:
    att = random_attention("plain", dtype=torch.float32)
    att = Attention(att.x, att.w_q, att.w_k, att.w_v, sinks=torch.tensor([200.0, 1000.0, 0.0]))
    norm = spectral_norm(att)
    exact = mp_oracle.norms(att)
    for s, row in enumerate(exact):
        for h, value in enumerate(row):
            assert not bool(norm.converged[s, h]) or float(norm.lower[s, h]) == pytest.approx(
                value.value, rel=3e-4
            )
            assert bool(norm.converged[s, h]) or float(norm.error[s, h]) > 1e-4
    assert norm.converged[:, 2].all()


class Diagonal(JacobianOperator):
    """Diagonal matrices in a dtype, of which some entries may be left out."""

    def __init__(self, values: torch.Tensor, dtype: torch.dtype):
        self.values, self.dtype, self.device = values.to(dtype), dtype, values.device
        self.batch, self.in_shape, self.out_shape = len(values), values.shape[1:], values.shape[1:]

    def jvp(self, x: torch.Tensor) -> torch.Tensor:
        return self.values * x

    vjp = jvp

    def select(self, index: torch.Tensor) -> "Diagonal":
        return Diagonal(self.values[index], self.dtype)


def test_what_the_search_does_not_see_at_all_is_found() -> None:
    """One entry of 64, the largest, is zero in float32: neither the vector that was found nor its
    value shows it."""
    full = torch.linspace(1, 2, 64, dtype=torch.float64).repeat(2, 1)
    full[1, 7] = 3.0
    seen = full.clone()
    seen[1, 7] = 0.0
    zero = torch.zeros(2, dtype=torch.float64)
    # a bound that says: much is added up here
    roundoff = Roundoff(zero, zero, torch.tensor([2.0, 1e7], dtype=torch.float64))
    wide, narrow = Diagonal(full, torch.float64), Diagonal(seen, torch.float32)
    norm = estimate(Problem(wide, roundoff, narrow, tol=1e-4, max_steps=500, seeds=[0, 1]))
    torch.testing.assert_close(
        norm.lower, torch.tensor([2.0, 3.0], dtype=torch.float64), rtol=2e-4, atol=0
    )
    assert norm.converged.all()


@pytest.mark.parametrize("size", [1e-320, 1e-70, 1e70, 1e300])
@pytest.mark.parametrize("name", ["x", "w_q", "w_v", "b_q", "w_o", "scale"])
def test_sizes_whose_products_leave_the_range_are_refused(name: str, size: float) -> None:
    att = random_attention("biases")
    far = changed(att, **{name: getattr(att, name) * size})
    for call in (spectral_norm, lb.token_norm, lb.frobenius_norm, bounds.get("castin")):
        with pytest.raises(LipboundError, match=f"largest entry of {name} is .* from 1e-60 to 1e"):
            call(far)


@pytest.mark.parametrize("delta", [None, 1e-6])
def test_zero_is_measured(delta: float | None) -> None:
    att = random_attention("plain")
    zero = spectral_norm(Attention(att.x, att.w_q, att.w_k, 0 * att.w_v), delta=delta)
    assert bool(zero.converged.all())


def test_a_search_that_finds_less_than_the_quotient_has_not_converged() -> None:
    """Rounding of the tensors is 1e-9 of the norm, that of the search 1e-7, downwards."""
    att = hard_heads.FAMILIES["sinks_take_all"](torch.Generator().manual_seed(0), torch.float32)
    att = att.select(slice(0, 2))
    norm = spectral_norm(att, map="head_out", wrt="values", tol=1e-10)
    for s, row in enumerate(mp_oracle.norms(att, "head_out", "v")):
        for h, value in enumerate(row):
            lower = float(norm.lower[s, h])
            assert lower <= value.upper
            assert float(norm.error[s, h]) >= value.value / lower - 1
            assert not bool(norm.converged[s, h]) or lower >= value.value * (1 - 1e-10)


def faint(seed: int, scale: float, *, sinks: bool = False) -> Attention:
    """Scores so small that the norm nearly vanishes, by keys, or at all where values are biases
    alone."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(1, 5, 6), (2, 6, 3), (2, 6, 3), (2, 6, 3), (2, 3), (2, 3), (2, 3)]
    x, w_q, w_k, w_v, *b = (torch.randn(shape, generator=g) for shape in shapes)
    if not sinks:
        return Attention(x, w_q, w_k, w_v, scale=scale)
    biases = dict(zip(("b_q", "b_k", "b_v"), b, strict=True))
    return Attention(x, w_q, w_k, 0 * w_v, scale=scale, sinks=torch.tensor([0.0, 1.0]), **biases)


@pytest.mark.parametrize("tol", [1e-4, 1e-8])
@pytest.mark.parametrize("delta", [None, 1e-6])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [1e-30, 1e-45, -1e-58])
def test_norms_that_nearly_vanish(scale: float, seed: int, delta: float | None, tol: float) -> None:
    for att, wrt in ((faint(seed, scale), "keys"), (faint(seed, scale, sinks=True), "input")):
        exact = mp_oracle.norms(att, "head", SIDE_OF.get(wrt))
        norm = spectral_norm(att, wrt=wrt, delta=delta, tol=tol)
        for h, value in enumerate(exact[0]):
            assert float(norm.lower[0, h]) <= value.upper
            assert float(norm.upper[0, h]) >= value.lower
            assert bool(norm.converged[0, h])
            assert float(norm.lower[0, h]) >= value.value * (1 - tol)


def test_a_mask_without_dimensions_is_refused() -> None:
    att = random_attention("plain")
    with pytest.raises(AttentionError, match="mask is one number"):
        Attention(att.x, att.w_q, att.w_k, att.w_v, mask=torch.tensor(0.0))
