"""No sound bound below the exact norm, over thousands of random, degenerate and
adversarial heads."""

from dataclasses import replace

import torch
from hypothesis import given
from support.oracles import dense_norms, encloses
from support.strategies import examples, layers

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.spectral_norm import l2_spectral_norm, spectral_norm

MODERATE = {
    "inputs": ("plain", "duplicates", "pairs", "collinear", "tiny"),
    "weights": ("plain", "tied", "no_query", "rank_one_values"),
}


def check(
    att: Attention, exact: torch.Tensor, exact_l2: torch.Tensor, slack: float, names: list[str]
) -> None:
    """``slack``: rounding of the references, relative."""
    for name in names:
        bound = bounds.get(name)
        value, sound = bound(att), bound.sound(att)
        assert value.shape == sound.shape == exact.shape
        assert not bool(value.isnan().any()), name
        reference = exact if bound.map == "head" else exact_l2
        assert bool((~sound | (value >= reference * (1 - slack))).all()), (
            name,
            float((value / reference)[sound].min()),
        )


@examples(100)
@given(layers())
def test_no_sound_bound_is_below_the_dense_norm(att: Attention) -> None:
    """100 shapes x 60 heads."""
    check(att, dense_norms(att), dense_norms(att, "l2"), 1e-9, bounds.names())


@examples(12)
@given(layers(torch.float32, **MODERATE))
def test_no_sound_bound_is_below_the_float32_norm(att: Attention) -> None:
    """12 shapes x 60 heads."""
    check(
        att,
        spectral_norm(att, tol=1e-5).lower,
        l2_spectral_norm(att, tol=1e-5).lower,
        1e-9,
        bounds.names(),
    )


@examples(50)
@given(layers())
def test_certified_enclosures_hold_the_dense_norm(att: Attention) -> None:
    """50 shapes x 60 heads: every norm enclosed, and to the width asked for."""
    norm = spectral_norm(att, tol=1e-6, delta=1e-10)
    dense, tiny = spectral_norm(att, method="dense"), tensor_error(att)
    exact = (dense.lower + dense.upper) / 2  # the same P: rounding of huge scores moves P itself
    assert bool((norm.converged | (tiny > 1e-7 * norm.lower)).all())
    assert bool(((norm.lower <= dense.upper) & (dense.lower <= norm.upper)).all())
    # elsewhere little is known of P, and the middle of the dense ends is nothing to compare with
    known = tiny < 0.1 * norm.lower
    assert encloses(
        replace(norm, lower=norm.lower[known], upper=norm.upper[known]),
        exact[known],
        1e-6,
        tiny[known],
    )
