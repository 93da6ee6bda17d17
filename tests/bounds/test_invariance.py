"""What changes nothing of a Jacobian, or only its size, changes no bound: at any size that the
dtype has room for."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, given_parts
from support.layers import KINDS, changed, random_attention
from support.strategies import MODERATE, examples, layers
from support.variants import HAS, layer

import lipbound as lb
from lipbound.bounds.ours import block_norms

OURS = ("lipbound", "lipbound_block")
PUBLISHED = [name for name in lb.bounds.names() if name not in OURS]
WITH_ONES = ("yudin", "yudin_g1", "yudin_sqrt_n", "yudin_closed", "newhouse")
"""With a query bias they append a one to every token (Remark 2), which does not scale with them."""


def times(t, s):
    return None if t is None else t * s


def inputs(att, s):
    """x times s, projections of queries and keys over s: the same J, in other units of tokens."""
    norms = {
        side: replace(norm, over=(norm.over[0] / s, norm.over[1]))
        for side in ("norm_q", "norm_k")
        if (norm := getattr(att, side)) is not None and norm.over is not None
    }
    return changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s, **norms)


def values(att, s):
    """Values and their biases times s: s J."""
    return changed(att, w_v=att.w_v * s, b_v=times(att.b_v, s))


def queries(att, s):
    """Queries times s, keys over s, where nothing is normalised: the same J."""
    if att.norm_q is not None or att.norm_k is not None:
        return att
    q, k = (att.w_q * s, times(att.b_q, s)), (att.w_k / s, times(att.b_k, 1 / s))
    return changed(att, w_q=q[0], b_q=q[1], w_k=k[0], b_k=k[1])


SCALED = {"inputs": inputs, "values": values, "queries": queries}


def expected(name, att, what, s):
    """What a bound on a layer becomes; None where its statement says something else."""
    value = lb.bounds.get(name)(att)
    if name == "kim" and what != "values":  # of degree two in W_Q
        return value / s / s if what == "inputs" else value * s * s
    if what != "inputs":
        return value * s if what == "values" else value
    if name == "specformer":  # whose last term is ||W_V|| ||X||_F^2
        att = att.double()
        n, size = att.lengths[:, None], (att.x.norm(dim=(-1, -2)) ** 2)[:, None]
        q, k, v = (torch.linalg.matrix_norm(w, 2) for w in (att.w_q, att.w_k, att.w_v))
        return n * (n + 1) * size * v * (q * k + s * s)
    # differences of values are what J sees of their biases, but for sinks and gates
    return None if name in WITH_ONES and att.b_q is not None else value


def check(att, what, s):
    """Of those bounds that cover the layer; of exceptional inputs, which have no output
    projection, published ones."""
    other, sinks = SCALED[what](att, s), {"sinks", "gate"} & att.variants
    for name in PUBLISHED if att.w_o is None else lb.bounds.names(None):
        bound = lb.bounds.get(name)
        if not bound.applies(att) or (what == "inputs" and sinks and att.b_v is not None):
            continue
        found, wanted = bound(other), expected(name, att, what, s)
        assert not bool((found.isnan() | (found < 0)).any()), name
        if wanted is not None:
            # near the end of the range the one is infinite, the other not; norms of matrices of
            # sizes may end a step earlier
            inside = wanted.isfinite() & (wanted < 1e300) & (wanted > 1e-300)
            rtol = block_norms.RTOL if name in OURS else 1e-9
            close(found[inside], wanted[inside], rtol)


SEEDS = st.integers(0, 10**6)
MILD = [kind for kind in KINDS if kind != "sharp"]
WIDE = st.one_of(
    layers(**MODERATE),
    st.builds(random_attention, st.sampled_from(MILD), SEEDS),
    st.builds(layer, SEEDS, st.sampled_from(list(map(frozenset, HAS)))),
)
NARROW = st.one_of(
    layers(torch.float32, **MODERATE),
    st.builds(random_attention, st.sampled_from(KINDS), SEEDS, st.just(torch.float32)),
)


@examples(60)
@given(WIDE, st.sampled_from(list(SCALED)), st.integers(-55, 55))
def test_sizes_do_not_matter(att, what, power):
    check(att, what, 10.0**power)


@examples(30)
@given(NARROW, st.sampled_from(list(SCALED)), st.integers(-60, 60))
def test_sizes_do_not_matter_in_float32(att, what, power):
    """By powers of two from 1e-18 to 1e18: others would round the given numbers."""
    check(att, what, 2.0**power)


@examples(30)
@given(st.sampled_from(KINDS), SEEDS)
def test_order_of_tokens_and_number_of_heads_do_not_matter(kind, seed):
    att = random_attention(kind, seed)
    order = torch.randperm(att.tokens, generator=torch.Generator().manual_seed(seed))
    mask = None if att.mask is None else att.mask[..., order, :][..., order]
    valid = None if att.valid is None else att.valid[:, order]
    other = changed(att, x=att.x[:, order], mask=mask, valid=valid)
    twice = {name: torch.cat([t, t]) for name, t in given_parts(att).items() if name != "x"}
    mask = att.mask if att.mask is None or att.mask.ndim < 4 else torch.cat([att.mask, att.mask], 1)
    doubled = changed(att, **twice, mask=mask, w_o=None)
    # block norms are within 1e-4 in float32; kernels may round products at another place of the
    # batch otherwise: by what Lemma 48 allows them
    same = att.d_v * (2 * att.x.shape[-1] + 2 * att.d_v + 20) * 2.0**-24
    for name in lb.bounds.names(None):
        rtol = 2e-4 if name in OURS else 1e-9
        value, again = lb.bounds.get(name)(att), lb.bounds.get(name)(doubled)
        close(lb.bounds.get(name)(other), value, rtol)
        close(again, torch.cat([value, value], 1), rtol)
        close(again[:, : att.heads], again[:, att.heads :], same)


@examples(30)
@given(st.sampled_from(KINDS), SEEDS, st.sampled_from((1.0, 100.0, 1e4)))
def test_what_all_keys_or_values_share_does_not_matter(kind, seed, shift):
    att = random_attention(kind, seed)
    b_k, b_v = (torch.full_like(w[:, 0], shift) for w in (att.w_k, att.w_v))
    if att.b_k is not None:
        b_k, b_v = b_k + att.b_k, b_v + att.b_v
    for name in OURS:
        value, other = map(lb.bounds.get(name), (att, changed(att, b_k=b_k, b_v=b_v)))
        close(other, value, block_norms.RTOL)


@pytest.mark.parametrize("exponent", [-55, 55])
def test_terms_are_fractions_and_rules_follow_at_any_scale(exponent):
    att, s = random_attention("plain"), 10.0**exponent
    other, large = inputs(att, s), changed(att, w_o=att.w_o * s)
    for name in lb.bounds.names():
        terms = lb.bounds.get(name).terms(other)
        if terms is not None:
            close(sum(terms.values()), torch.ones(2, 3, dtype=torch.float64))
    for rule in ("sum", "root_sum_square", "folded", "best"):
        value = lb.bounds.whole_layer(att, "yudin", rule=rule)
        close(lb.bounds.whole_layer(other, "yudin", rule=rule), value)
        close(lb.bounds.whole_layer(large, "yudin", rule=rule), value * s)
    close(lb.bounds.over_ball(values(att, s), 0.1), lb.bounds.over_ball(att, 0.1) * s, 1e-6)
