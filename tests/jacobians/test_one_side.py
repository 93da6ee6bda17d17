"""Norms of heads as functions of their keys, values or queries alone, against autograd."""

from functools import partial

import pytest
import torch
from support import hard_heads, judge, mp_oracle
from support.checks import refused
from support.layers import in_units, places
from support.oracles import encloses
from support.reference import head_function
from support.strategies import part
from support.variants import MASKS, VARIANTS, cross, layer

import lipbound as lb
from lipbound.jacobians import one_side, streaming
from lipbound.jacobians.in_range import in_range
from lipbound.jacobians.maps import SIDE_OF

EACH = sorted(SIDE_OF)


def jacobian(att, s, h, wrt, map="head"):
    """The autograd Jacobian of the definition by the vectors of a side, padding left out."""
    att, side = att.double(), SIDE_OF[wrt]
    real = att.valid_rows if side == "q" else att.valid_keys
    x = att.x[s] if att.valid is None else att.x[s][att.valid[s]]
    point = {"q": att.wide_q, "k": att.wide_k, "v": att.wide_v}[side][s, h]
    f = head_function(att, s, h)

    def moved(y):
        out = f(x, **{side: y})
        return out if map == "head" else out @ att.w_o[h]

    found = torch.func.jacrev(moved)(point if real is None else point[real[s]])
    return found.reshape(found.shape[0] * found.shape[1], -1)


def norms(att, wrt, map="head"):
    found = [torch.linalg.matrix_norm(jacobian(att, *at, wrt, map), 2) for at in places(att)]
    return torch.stack(found).view(att.samples, att.heads)


def check(att, wrt, map):
    exact, wide = norms(att, wrt, map), in_range(att, map, SIDE_OF[wrt])
    error = wide.allowance(wide.jacobian()).tensors.view(exact.shape) * 2.0**wide.exponents
    assert bool((error < 1e-8).all())
    dense = lb.spectral_norm(att, map=map, wrt=wrt, method="dense")
    found = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-9, delta=1e-6)
    estimate = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-9)
    for norm in (dense, found, estimate):
        assert encloses(norm, exact, 1e-9, error)
    assert bool(torch.isfinite(found.upper).all())


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("has", ["", *VARIANTS, "rotation norm cap sinks values gate"])
@pytest.mark.each_value
def test_every_variant(has, mask, wrt, map):
    check(layer(3, frozenset(has.split()), mask=mask), wrt, map)


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("stream", ["queries", "memory"])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(stream, wrt, map, padded):
    check(cross(1, stream, has=frozenset({"cap"}), padded=padded), wrt, map)


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("variant", ["plain", "gate", "cross"])
def test_singular_vectors_are_those_of_the_jacobian(variant, wrt, map):
    att = cross(2, "queries") if variant == "cross" else layer(2, frozenset({variant} - {"plain"}))
    norm = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-12, delta=1e-6, vectors=True)
    for s, h in ((0, 0), (1, 2)):
        j = jacobian(att, s, h, wrt, map)
        left, right = norm.left[s, h], norm.right[s, h]
        count = att.rows if wrt == "queries" else att.keys
        assert left.shape == (att.rows, att.d_v if map == "head" else att.w_o.shape[2])
        assert right.shape == (count, att.d_v if wrt == "values" else att.d)
        assert torch.allclose(right.norm(), torch.ones(()).double())
        assert torch.allclose(j @ right.flatten(), norm.lower[s, h] * left.flatten(), atol=1e-6)


@pytest.mark.each_value(family=tuple(hard_heads.FAMILIES)[::2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_enclosures_hold_where_rounding_does_its_worst(family, wrt, dtype):
    att = judge.case(family, dtype, 7).select(slice(0, part(2, 1)))
    for map in ["head"] if att.w_o is None else ["head", "head_out"]:
        exact = mp_oracle.norms(att, map, SIDE_OF[wrt])
        for method, delta in (("dense", None), ("lanczos", 1e-9)):
            norm = lb.spectral_norm(att, map=map, wrt=wrt, method=method, tol=1e-6, delta=delta)
            judge.assert_holds(norm.lower, norm.upper, exact)


@pytest.mark.parametrize(
    ("family", "wrt", "found"),
    [("common_offset", "values", [0, 0]), ("cancelling_projections", "keys", [0, 0]),
     ("cancelling_projections", "queries", [1, 1])],
)  # fmt: skip
def test_estimates_in_float32_know_the_projections_of_what_is_held(family, wrt, found):
    att = judge.case(family, torch.float32, 1).select(slice(0, 2))
    s, h = found
    norm, exact = lb.spectral_norm(att, wrt=wrt), mp_oracle.norm(att, s, h, side=SIDE_OF[wrt])
    assert bool(norm.converged[s, h])
    assert exact.value * (1 - 1e-4) <= float(norm.lower[s, h]) <= exact.upper


def test_blocks_of_queries_are_formed_for_some_entries_at_a_time(monkeypatch):
    att = layer(1, frozenset({"rotation"}))
    whole = lb.spectral_norm(att, wrt="queries", vectors=True)
    monkeypatch.setattr(one_side, "BLOCK_BYTES", 2 * 8 * att.tokens * att.d_v * att.d)
    pieces = lb.spectral_norm(att, wrt="queries", vectors=True)
    assert torch.allclose(pieces.lower, whole.lower, rtol=1e-12)
    assert torch.allclose(pieces.left, whole.left)
    check(att, "queries", "head")


@pytest.mark.parametrize("wrt", EACH)
def test_streamed_and_float32(wrt, monkeypatch):
    att = layer(4, frozenset({"rotation", "cap", "sinks"}), mask="window", n=9)
    exact = norms(att, wrt)
    single = lb.spectral_norm(att.to(torch.float32), wrt=wrt, tol=1e-4, delta=1e-6)
    assert torch.allclose(single.lower, exact, rtol=2e-4)
    assert bool(single.converged.all())
    monkeypatch.setitem(streaming.WHOLE_BYTES, "cpu", 1)
    assert isinstance(streaming.head_jacobian(att), streaming.StreamedHeadJacobian)
    check(att, wrt, "head")
    check(att, wrt, "head_out")


@pytest.mark.parametrize("wrt", EACH)
def test_power_iteration_agrees(wrt):
    att, how = layer(5, frozenset({"norm"})), {"method": "power", "tol": 1e-10, "max_steps": 4000}
    found = lb.spectral_norm(att, map="head_out", wrt=wrt, **how)
    assert torch.allclose(found.lower, norms(att, wrt, "head_out"), rtol=1e-6)


@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("exponent", [-40, 60])
def test_units_of_tensors_are_found_again(exponent, wrt):
    att = layer(6, frozenset())
    names = ("w_q", "b_q", "w_k", "b_k", "w_v", "b_v")
    far = in_units(att, **{name: -exponent if name[-1] == "k" else exponent for name in names})
    moved = {"keys": 2 * exponent, "queries": 0, "values": 0}[wrt]
    for map in ("head", "head_out"):
        near = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-9, delta=1e-6)
        found = lb.spectral_norm(far, map=map, wrt=wrt, tol=1e-9, delta=1e-6)
        assert bool(found.converged.all())
        assert torch.allclose(found.lower, near.lower * 2.0**moved, rtol=1e-8)


def test_values_alone_have_the_norm_of_the_probabilities():
    att = layer(8, frozenset({"rotation"}), mask="causal")
    w_o = torch.linalg.matrix_norm(att.w_o, 2)
    p = torch.linalg.matrix_norm(att.p, 2)
    for map, exact in (("head", p), ("head_out", p * w_o)):
        norm = lb.spectral_norm(att, map=map, wrt="values", tol=1e-10, delta=1e-6)
        assert torch.allclose(norm.lower, exact, rtol=1e-9)
        assert bool((norm.upper >= exact * (1 - 1e-14)).all())


def test_one_token_has_nothing_to_choose_from():
    att = layer(9, frozenset(), n=1)
    for wrt, exact in (("keys", 0.0), ("queries", 0.0), ("values", 1.0)):
        norm = lb.spectral_norm(att, wrt=wrt, method="dense")
        assert torch.allclose(norm.lower, torch.tensor(exact).double(), atol=1e-12)
        assert bool((norm.upper >= exact).all())


def test_refusals():
    att = layer(0, frozenset())
    refused(partial(lb.spectral_norm, att, wrt="tokens"), "wrt")
    for map in ("heads", "layer", "residual"):
        refused(partial(lb.spectral_norm, att, map=map, wrt="keys"), "wrt='keys' is of one head")
