"""Enclosures hold the norm, and sound bounds are not below it, on heads on which rounding does its
worst; nothing is allowed for rounding.

Truth is the norm of the Jacobian of the given floating-point numbers, to 80 digits.
``LIPBOUND_SEEDS=50`` makes it 50 layers of each family, with all methods on all of them;
`benchmarks/adversarial.py` prints what was seen.
"""

import os

import pytest
import torch
from support import hard_heads, judge, mp_oracle
from support.checks import normal, normal_layer
from support.judge import WHOLE
from support.layers import changed
from support.strategies import part

import lipbound as lb
from lipbound.jacobians.spectral_norm import spectral_norm

METHODS = (*judge.METHODS, judge.ESTIMATE)
LONG = int(os.environ.get("LIPBOUND_SEEDS", "0"))
SEEDS = {torch.float32: 0, torch.float64: 1}
REFUSED = set("sinks sinks_take_all modern several_variants variants_far_away subnormal".split())
"""Families of which some norms are below what products in the dtype can carry: to say so is right,
if not the best."""
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["float32", "float64"]
)


def check(verdicts, family=""):
    wrong = [verdict for verdict in verdicts if verdict.miss > 0]
    assert not wrong, judge.summary(wrong)
    # whose map has another scale than the head's
    refused = {verdict.method for verdict in verdicts if verdict.refused} - {judge.L2}
    assert not refused or family in REFUSED, refused
    assert any(not verdict.refused for verdict in verdicts)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_nothing_is_wrong_on_hard_heads(family, dtype):
    verdicts = []
    for seed in range(LONG) if LONG else [SEEDS[dtype]]:
        att, name = judge.case(family, dtype, seed), f"{family}({seed})"
        if LONG:
            verdicts += judge.judge(att, name, methods=METHODS)
            continue
        att = att.select(slice(0, part(att.samples, 2)))
        exact = mp_oracle.norms(att)
        chosen = lb.bounds.names()
        verdicts += judge.judge(att, name, methods=METHODS, chosen=chosen, l2=False, exact=exact)
    check(verdicts, family)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("map", ["head_out", *WHOLE])
def test_nothing_is_wrong_of_other_maps(map, dtype):
    verdicts = []
    families = list(hard_heads.FAMILIES)[dtype == torch.float64 :: 1 if LONG else 2]
    for family in families[:: len(families) // part(len(families), 9)]:
        att = judge.case(family, dtype, 100).select(slice(0, 1))
        if family not in REFUSED:
            verdicts += judge.judge(att, family, map=map, methods=["lanczos"])
    check(verdicts)


# -- heads that went wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-10, 1e-6, 0.1])
def test_pairs_far_away(delta):
    """A norm of 0.96 is not zero."""
    att = hard_heads.pairs_far_away()
    assert mp_oracle.norm(att).value == pytest.approx(0.9647, abs=1e-4)
    check(list(judge.judge(att, "pairs_far_away", delta=delta)))


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4, 1e5, 1e6])
def test_pairs_at_any_distance(offset, dtype):
    verdicts = []
    for seed in range(part(20)):
        att = hard_heads.pairs_far_away(seed, offset).to(dtype)
        verdicts += judge.judge(att, f"pairs_far_away({seed})", chosen=lb.bounds.names(), l2=False)
    check(verdicts)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize(("n", "pull"), [(32, 10.0), (128, 10.0), (12, 6.0), (12, 14.0)])
def test_one_token_that_all_attend_to(n, pull, dtype):
    """Attention sinks: what rounding does to each of n rows adds up."""
    att = hard_heads.sink_token(n, dtype, pull)
    if n == 32:
        assert mp_oracle.norm(att).value == pytest.approx(11.911, abs=1e-3)
    check(list(judge.judge(att, f"sink_token({n})", l2=False)))


def ordinary(dtype, biased):
    """2 samples x 2 heads, none of it exceptional."""
    att, draw = normal_layer(0, 5, 4, 3, samples=2, heads=2), normal(1)
    att = changed(att, b_q=draw(2, 3), b_k=draw(2, 3), b_v=draw(2, 3)).to(dtype)
    return att if biased else att.without_biases()


MOST = {torch.float32: 60, torch.float64: 190}
"""Powers of two next to 1e18 and 1e57."""
SCALED = {
    "inputs": lambda a, s: changed(a, x=a.x * s, w_q=a.w_q / s, w_k=a.w_k / s),
    "values": lambda a, s: changed(a, w_v=a.w_v * s, b_v=None if a.b_v is None else a.b_v * s),
    "keys shifted": lambda a, s: changed(a, b_k=torch.full_like(a.w_k[:, 0], 1e4 * s)),
    "values shifted": lambda a, s: changed(a, b_v=torch.full_like(a.w_v[:, 0], 1e6 * s)),
}


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("size", [-1.0, -0.5, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("what", SCALED)
def test_ordinary_heads_of_any_size(what, size, biased, dtype):
    """At any size that the dtype has room for, and far from zero."""
    power = int(size * MOST[dtype]) if what in ("inputs", "values") else int(4 * size)
    att = SCALED[what](ordinary(dtype, biased), 2.0**power)
    verdicts = list(judge.judge(att, what, methods=METHODS, l2=False))
    check(verdicts)
    assert all(verdict.converged for verdict in verdicts if verdict.method in METHODS)


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_saturated_heads_are_enclosed(method):
    """Logits of 1e7: rounding changes probabilities by 1e-7 or more, and says so."""
    att = normal_layer(0, 8, 6, 3, samples=2, heads=2, scale=1e6)
    norm = spectral_norm(att, method=method, tol=1e-3, delta=1e-6 if method == "lanczos" else None)
    assert bool((norm.converged == (norm.upper <= norm.lower * (1 + 1e-3))).all())
    judge.assert_holds(norm.lower, norm.upper, mp_oracle.norms(att))
    norm = spectral_norm(changed(att, scale=1e20), delta=1e-6)
    assert bool(torch.isfinite(norm.upper).all())
    assert not bool(norm.converged.any())


@pytest.mark.parametrize("seed", range(4))
def test_errors_of_estimates_whose_products_rounding_hides(seed):
    """Products with W^T W round as squares do: what has not converged claims no small error."""
    att = judge.case("normalised", torch.float32, 5005).select(slice(4, 5), slice(0, 1))
    norm, exact = spectral_norm(att, seed=seed), mp_oracle.norm(att)
    assert not bool(norm.converged)
    assert not judge.above(float(norm.lower), exact)
    if bool(norm.error.isfinite()):  # else nothing is claimed
        assert not judge.below(float(norm.lower * (1 + norm.error)), exact)
