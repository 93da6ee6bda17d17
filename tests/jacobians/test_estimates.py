"""Norms without ``delta`` where float32 products, or the range of float64, cannot resolve them:
right, or not converged."""

from functools import partial
from itertools import product

import pytest
import torch
from support import judge, mp_oracle
from support.checks import close, normal, refused
from support.layers import changed, random_attention
from support.mp_oracle import Enclosed
from support.oracles import dense_norms

import lipbound as lb
from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.jacobians.maps import SIDE_OF
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.enclose import Problem, estimate
from lipbound.linalg.operators import JacobianOperator, Roundoff


def hold(norm: lb.Norm, exact: list[list[Enclosed]], tol: float, *, converged: bool) -> None:
    """Ends are right, and so are converged lower ends to ``tol``; ``converged``: all are."""
    judge.assert_holds(norm.lower, norm.upper, exact)
    values = torch.tensor([one.value for row in exact for one in row], dtype=torch.float64)
    near = norm.lower.flatten() >= values * (1 - tol)
    assert bool((near | ~norm.converged.flatten()).all())
    assert not converged or bool(norm.converged.all())


@pytest.mark.parametrize("near", [1e-5, 1e-7])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_heads_that_cancel(seed: int, near: float) -> None:
    """Two heads in float32 whose outputs cancel but for ``near``."""
    draw = normal(seed)
    w_q, w_k, w_v, w_o = draw(1, 5, 3), draw(1, 5, 3), draw(1, 5, 3), draw(1, 3, 4)
    w_v = torch.cat([w_v, w_v * (1 + near * draw(1, 5, 3))])
    parts = (draw(1, 4, 5), w_q.repeat(2, 1, 1), w_k.repeat(2, 1, 1), w_v)
    att = Attention(*(t.float() for t in parts), w_o=torch.cat([w_o, -w_o]).float())
    # float64 resolves what is left of eleven digits
    exact = mp_oracle.norms(att, "layer")
    hold(spectral_norm(att, map="layer"), exact, 3e-4, converged=near == 1e-5)


def test_a_sink_that_leaves_nothing_in_float32() -> None:
    att = random_attention("plain", dtype=torch.float32)
    att = changed(att, sinks=torch.tensor([200.0, 1000.0, 0.0]))
    norm = spectral_norm(att)
    hold(norm, mp_oracle.norms(att), 3e-4, converged=False)
    assert bool((norm.converged | (norm.error > 1e-4)).all())
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
    norm = estimate(Problem(wide, lambda: roundoff, narrow, tol=1e-4, max_steps=500, seeds=[0, 1]))
    close(norm.lower, torch.tensor([2.0, 3.0], dtype=torch.float64), 2e-4)
    assert norm.converged.all()


def test_errors_of_close_singular_values() -> None:
    """Where the first two are nearer than float32 tells, the second may have been found."""
    for seed, sample, head in ((51006, 0, 1), (51037, 5, 0), (51007, 2, 1)):
        att = judge.case("degenerate", torch.float32, seed)
        att = att.select(slice(sample, sample + 1), slice(head, head + 1))
        exact = dense_norms(att.double())
        for start in range(5):
            norm = spectral_norm(att, seed=start)
            assert bool(norm.converged.all())
            assert bool((norm.lower * (1 + norm.error) >= exact * (1 - 1e-12)).all())
            fine = spectral_norm(att, seed=start, tol=1e-7)
            assert bool((fine.lower * (1 + fine.error) >= exact * (1 - 1e-12)).all())


def test_errors_of_heads_whose_products_cancel() -> None:
    """Terms of 1e6 add up to a norm of 0.2: what float64 rounds of J J^T hides the top."""
    att = judge.case("latent_vectors", torch.float32, 121_091_020)
    att = att.select(slice(0, 1), slice(1, 2))
    exact = mp_oracle.norms(att)[0][0].value
    for start in range(40):
        norm = spectral_norm(att, seed=start)
        assert float(norm.lower * (1 + norm.error)) >= float(exact) * (1 - 1e-12)


@pytest.mark.parametrize("size", [1e-320, 1e-70, 1e70, 1e300])
@pytest.mark.parametrize("name", ["x", "w_q", "w_v", "b_q", "w_o", "scale"])
def test_sizes_whose_products_leave_the_range_are_refused(name: str, size: float) -> None:
    att = random_attention("biases")
    far = changed(att, **{name: getattr(att, name) * size})
    for call in (spectral_norm, lb.token_norm, lb.frobenius_norm, bounds.get("castin")):
        refused(partial(call, far), f"largest entry of {name} is ", " from 1e-60 to 1e")


def test_a_search_that_finds_less_than_the_quotient_has_not_converged() -> None:
    """Rounding of the tensors is 1e-9 of the norm, that of the search 1e-7, downwards."""
    att = judge.case("sinks_take_all", torch.float32, 0).select(slice(0, 2))
    norm = spectral_norm(att, map="head_out", wrt="values", tol=1e-10)
    exact = mp_oracle.norms(att, "head_out", "v")
    hold(norm, exact, 1e-10, converged=False)
    values = torch.tensor([[value.value for value in row] for row in exact], dtype=torch.float64)
    assert bool((norm.error >= values / norm.lower - 1).all())


def faint(seed: int, scale: float, *, sinks: bool = False) -> Attention:
    """Scores so small that the norm nearly vanishes, by keys, or at all where values are biases
    alone."""
    draw = normal(seed, torch.float32)
    x, (w_q, w_k, w_v) = draw(1, 5, 6), (draw(2, 6, 3) for _ in range(3))
    if not sinks:
        return Attention(x, w_q, w_k, w_v, scale=scale)
    biases = {name: draw(2, 3) for name in ("b_q", "b_k", "b_v")}
    return Attention(x, w_q, w_k, 0 * w_v, scale=scale, sinks=torch.tensor([0.0, 1.0]), **biases)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [1e-30, 1e-45, -1e-58])
def test_norms_that_nearly_vanish(scale: float, seed: int) -> None:
    for att, wrt in ((faint(seed, scale), "keys"), (faint(seed, scale, sinks=True), "input")):
        exact = mp_oracle.norms(att, "head", SIDE_OF.get(wrt))
        for delta, tol in product((None, 1e-6), (1e-4, 1e-8)):
            hold(spectral_norm(att, wrt=wrt, delta=delta, tol=tol), exact, tol, converged=True)
