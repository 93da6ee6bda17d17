"""Rotation, q/k-norm, caps, sinks and masks, alone and together: exact norms and bounds against
dense Jacobians of the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, near, normal
from support.oracles import assert_encloses, oracle
from support.strategies import examples, part
from support.variants import MASKS, VARIANTS, layer

import lipbound as lb
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.jacobians.rounding import tensor_error
from lipbound.jacobians.streaming import StreamedHeadJacobian

CASES = {
    "seed": st.integers(0, 10**6),
    "has": st.frozensets(st.sampled_from(VARIANTS)),
    "mask": st.sampled_from(MASKS),
    "n": st.integers(1, 7),
    "d": st.integers(2, 6),
    "d_v": st.integers(1, 5),
    "turned": st.integers(1, 3),
    "scale": st.sampled_from([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0]),
    "biases": st.booleans(),
    "same": st.booleans(),
    "samples": st.just(part(3, 2)),
    "heads": st.just(part(6, 3)),
}


@examples(180)
@given(st.builds(layer, **CASES))
def test_exact_norms_and_bounds(att):
    """180 shapes x 18 heads; of `make test` six heads each."""
    exact = oracle(att)
    off = (lb.spectral_norm(att, tol=1e-10).lower - exact).abs()
    assert bool((off <= 1.1e-8 * exact + 3 * tensor_error(att)).all())
    assert_bounds_hold(att, exact)
    assert lb.bounds.get("lipbound").applies(att)


@pytest.mark.parametrize("mask", MASKS)
def test_queries_that_are_normalised_after_they_are_turned(mask):
    before = layer(3, frozenset({"norm", "rotation"}), mask=mask)
    att = before.with_parts(norm_late=True)
    exact = oracle(att)
    assert not torch.allclose(exact, oracle(before))
    assert_encloses(att, lb.spectral_norm(att, tol=1e-10, delta=1e-9), exact, 1e-9)
    assert_bounds_hold(att, exact)


def assert_bounds_hold(att, exact):
    for bound in map(lb.bounds.get, lb.bounds.names()):
        if bound.map == "head" and bound.applies(att):
            assert bool((bound(att) >= exact * (1 - 1e-9))[bound.sound(att)].all()), bound


TOGETHER = ({"rotation", "together", "cap", "sinks"}, {"rotation", "norm", "sinks"})


@pytest.mark.each_value(has=({"norm"}, {"together"}, *TOGETHER))
@pytest.mark.parametrize("has", [*({v} for v in VARIANTS), *TOGETHER])
@pytest.mark.parametrize("mask", MASKS)
def test_products_streams_and_whole_layers(has, mask):
    att = layer(3, frozenset(has), mask=mask)
    op = lb.HeadJacobian(att)
    y = normal()(op.batch, *op.out_shape)
    if att.valid is not None:
        y = (y.view(2, 3, *op.out_shape) * att.valid[:, None, :, None]).view_as(y)
    near(op.gram(y), StreamedHeadJacobian(att).gram(y), 1e-10)
    near(op.gram(y), op.jvp(op.vjp(y)), 1e-10)
    near(op.select(torch.tensor([4, 1])).gram(y[[4, 1]]), op.gram(y)[[4, 1]], 1e-10)
    known = {}
    for map in ("heads", "layer", "head_out", "residual"):
        norm = lb.spectral_norm(att, map=map, tol=1e-9, delta=1e-9)
        dense = known[map] = lb.spectral_norm(att, map=map, method="dense")
        close(norm.lower, dense.lower, 1e-8)
        assert bool((norm.upper >= dense.lower * (1 - 1e-9)).all())
    assert bool((lb.bounds.whole_layer(att, "lipbound", map="layer") >= known["layer"].lower).all())
    close(lb.spectral_norm(att.to(torch.float32), tol=1e-6).lower, oracle(att), 1e-4)
    top = lb.spectral_norm(att, tol=1e-10, vectors=True)
    reached = lb.HeadJacobian(att).along(top.right.flatten(0, 1))
    close(reached.norm(dim=(-1, -2)).view(2, 3), top.lower, 1e-6)
    paths = lb.HeadJacobian(att).paths(top.right.flatten(0, 1))
    near(sum(paths.values()), reached, 1e-10)


@pytest.mark.parametrize("has", [{"rotation"}, {"together", "rotation"}, {"norm", "sinks", "cap"}])
def test_parts_of_a_layer(has):
    att = layer(5, frozenset(has), mask="padded")
    whole, single = oracle(att), att.to(torch.float32)
    close(oracle(att.select(slice(1, 2), slice(1, 3))), whole[1:, 1:])
    close(oracle(att.unpadded(1)), whole[1:])
    close(lb.spectral_norm(single, tol=1e-6).lower, whole, 1e-4)
    close(oracle(single.double()), whole, 1e-4)


@pytest.mark.each_value(has=({"rotation", "cap"}, {"together", "sinks"}))
@pytest.mark.parametrize("has", [{"rotation", "cap"}, {"together", "sinks"}, {"rotation"}, {"cap"}])
def test_padding_takes_no_part_in_bounds(has):
    att = layer(5, frozenset(has), mask="padded")
    alone = att.unpadded(1)
    for name in lb.bounds.names():
        bound = lb.bounds.get(name)
        if bound.applies(att):
            close(bound(att)[1:], bound(alone), 1e-6)


def test_layer_norm_is_rms_norm_after_centred_weights():
    att = layer(2, frozenset())
    centred = att.w_q - att.w_q.mean(-1, keepdim=True)
    bias = att.b_q - att.b_q.mean(-1, keepdim=True)
    gain = torch.tensor([[1.0, 2.0, 0.5, -1.0]] * 3, dtype=torch.float64)
    mine = att.with_parts(w_q=centred, b_q=bias, norm_q=QKNorm(gain, eps=1e-5))
    y = torch.einsum("snd,hde->shne", att.x, att.w_q) + att.b_q[:, None]
    near(mine.q, torch.nn.functional.layer_norm(y, (4,), gain[0], eps=1e-5), 1e-10)


def test_a_neutral_variant_changes_nothing():
    """A cap and sinks that are far away, or a rotation by nothing, leave plain attention, and
    little of its bounds."""
    plain = layer(1, frozenset())
    far = plain.with_parts(cap=1e8, sinks=torch.full((3,), -1e4).double())
    still = plain.with_parts(rotation=Rotation.of_angles(torch.zeros(5, 2)))
    own, *others = (lb.spectral_norm(att, tol=1e-10).lower for att in (plain, far, still))
    for other in others:
        close(other, own, 1e-8)
    ours, block = lb.bounds.get("lipbound"), lb.bounds.get("lipbound_block")
    close(block(still), block(plain), 0.01)
    assert bool((ours(still) <= 1.5 * ours(plain)).all())
