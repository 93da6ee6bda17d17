"""Cross-attention: each of its streams against dense Jacobians of the definition, and torch's own
function."""

from functools import partial

import pytest
import torch
from support.checks import close, near, normal, refused
from support.layers import in_units
from support.oracles import oracle
from support.variants import cross

import lipbound as lb
from lipbound.jacobians.rounding import tensor_error
from lipbound.reporting.page.render import of_layer

HAS = [(), ("norm",), ("values",), ("cap", "sinks"), ("offsets",)]
STREAMS = ("queries", "memory")


@pytest.mark.each_value
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(4, 6), (6, 4), (5, 5), (1, 3)])
@pytest.mark.parametrize("has", HAS)
@pytest.mark.parametrize("stream", STREAMS)
def test_norms_and_bounds(stream, has, rows, keys, padded):
    padded = padded and rows > 2
    att = cross(rows, stream, has=frozenset(has), padded=padded, rows=rows, keys=keys)
    exact = oracle(att)
    norm, slack = lb.spectral_norm(att, tol=1e-10, delta=1e-9), 1e-9 * exact + 3 * tensor_error(att)
    assert bool(((norm.lower - exact).abs() <= slack).all())
    assert bool((norm.upper >= exact * (1 - 1e-12)).all() and (norm.upper <= exact + slack).all())
    for name in ("lipbound", "lipbound_block"):
        assert bool((lb.bounds.get(name)(att) >= exact * (1 - 1e-12)).all()), name
    assert not lb.bounds.get("castin_bias").applies(att)


@pytest.mark.parametrize("stream", STREAMS)
def test_maps_and_dtypes(stream):
    att = cross(3, stream, padded=True)
    for map in ("heads", "layer", "head_out"):
        norm = lb.spectral_norm(att, map=map, tol=1e-9, delta=1e-9)
        dense = lb.spectral_norm(att, map=map, method="dense").lower
        close(norm.lower, dense, 1e-8)
        assert bool((norm.upper >= dense * (1 - 1e-9)).all())
        if map != "head_out":
            bound = lb.bounds.whole_layer(att, "lipbound", map=map)
            assert bool((bound >= dense).all())
    narrow = lb.spectral_norm(att.to(torch.float32), tol=1e-6).lower
    close(narrow, oracle(att), 1e-5)
    top = lb.spectral_norm(att, tol=1e-10, vectors=True)
    assert top.left.shape == (2, 3, 4, 3)
    assert top.right.shape == (2, 3, 4 if stream == "queries" else 6, 7)
    reached = lb.HeadJacobian(att).along(top.right.flatten(0, 1))
    near(reached, (top.lower[..., None, None] * top.left).flatten(0, 1), 1e-6)


@pytest.mark.parametrize("exponent", [-180, 180])
@pytest.mark.parametrize("stream", STREAMS)
def test_units_change_nothing(stream, exponent):
    """Tokens times a power of two, and projections divided by it."""
    att, unit = cross(5, stream), 2.0**exponent
    other = in_units(att, x=exponent, **dict.fromkeys(("w_q", "w_k", "w_v"), -exponent))
    mine, expected = lb.spectral_norm(other, tol=1e-9, delta=1e-9), oracle(att)
    assert bool((mine.lower * unit <= expected * (1 + 1e-12)).all())
    close(mine.lower * unit, expected, 1e-8)


def function(stream, tensors, mask, head):
    """The Jacobian of torch's own attention, as a matrix."""
    x, memory, w_q, w_k, w_v = tensors

    def out(x, memory):
        sides = x @ w_q[head], memory @ w_k[head], memory @ w_v[head]
        return torch.nn.functional.scaled_dot_product_attention(*sides, attn_mask=mask)

    argument = 0 if stream == "queries" else 1
    jacobian = torch.autograd.functional.jacobian(out, (x[0], memory[0]), vectorize=True)
    return jacobian[argument].flatten(0, 1).flatten(1)


@pytest.mark.parametrize("stream", STREAMS)
def test_from_tensors(stream):
    draw, shapes = normal(), [(1, 4, 8), (1, 5, 6), (2, 8, 4), (2, 6, 4), (2, 6, 3)]
    tensors, mask = [draw(*shape) for shape in shapes], draw(4, 5)
    att = lb.cross_attention(*tensors, stream=stream, mask=mask)
    exact = [torch.linalg.matrix_norm(function(stream, tensors, mask, h), 2) for h in (0, 1)]
    close(lb.spectral_norm(att, tol=1e-10).lower[0], torch.stack(exact), 1e-8)
    refused(partial(lb.cross_attention, *tensors, stream="keys"), "stream")
    wrong = partial(lb.cross_attention, tensors[1], *tensors[1:], stream=stream)
    refused(wrong, "do not fit", error=lb.errors.AttentionError)


@pytest.mark.parametrize("stream", STREAMS)
def test_steeper_inputs_are_found(stream):
    att = cross(3, stream, padded=True)
    found = lb.attack(att, 0.3, steps=5, starts=4)
    assert bool((found.norm >= oracle(att) * (1 - 1e-5)).all())
    for s, h in ((0, 0), (1, 2)):
        there = att.unpadded(s).select(heads=slice(h, h + 1))
        keep = slice(None) if att.valid is None else att.valid[s]
        exact = oracle(there.at(found.x[s, h][keep][None]))[0, 0]
        close(found.norm[s, h], exact, 1e-5)


@pytest.mark.parametrize("stream", STREAMS)
def test_what_is_for_self_attention(stream):
    att = cross(3, stream)
    for ask, words in (
        (partial(lb.token_norm, att), "does not cover cross-attention"),
        (partial(lb.token_profile, att), "does not cover cross-attention"),
        (partial(of_layer, att.unpadded(0), "head", []), "does not cover cross-attention"),
        (partial(lb.spectral_norm, att, map="residual"), "needs self-attention"),
    ):
        refused(ask, words, error=lb.errors.AttentionError)
