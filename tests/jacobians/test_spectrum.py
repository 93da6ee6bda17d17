"""Frobenius norms and condition numbers, against dense autograd Jacobians of the definition."""

from functools import partial

import pytest
import torch
from support.checks import close, refused
from support.layers import changed, random_attention
from support.models import AFFINE, build, inputs_for
from support.oracles import matrices
from support.variants import cross
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.models.capture.capture import Capturer

HAS = ((), ("rotation",), ("together", "rotation"), ("cap", "sinks"), ("values",), ("latent",))
HAS = (*HAS, ("gate",), ("gate", "norm"))


def check(att: Attention, map: str = "head") -> None:
    """Both numbers of a layer."""
    frobenius, condition = lb.frobenius_norm(att, map=map), lb.condition_number(att, map=map)
    assert frobenius.dtype == condition.dtype == torch.float64
    for s in range(att.samples):
        values = torch.linalg.svdvals(matrices(att, s, map))  # (heads or 1, values)
        close(frobenius[s].view(-1), values.norm(dim=1))
        # of an output projection that is wider than a head, the other values are zero
        n = values.shape[1] * (att.d_v if map == "head_out" else 1)
        smallest = values[:, n // (att.w_o.shape[2] if map == "head_out" else 1) - 1]
        for ratio, value in zip(smallest / values[:, 0], condition[s].view(-1), strict=True):
            if ratio > 1e-6 or value < torch.inf:
                assert float(value) == pytest.approx(float(1 / ratio), rel=0.02)


def test_kinds(kind: str) -> None:
    check(random_attention(kind))


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
@pytest.mark.parametrize("kind", ["biases", "padded", "wide_values"])
def test_maps(kind: str, map: str) -> None:
    check(random_attention(kind), map)


@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
@pytest.mark.parametrize("has", HAS)
def test_variants(has: tuple[str, ...], mask: str) -> None:
    check(variant_layer(1, frozenset(has), mask=mask))


def test_both_streams_of_cross_attention() -> None:
    for stream in ("queries", "memory"):
        check(cross(0, stream))


def test_float32_numbers_are_those_given() -> None:
    att = random_attention("biases", dtype=torch.float32)
    close(lb.frobenius_norm(att), lb.frobenius_norm(att.double()))


@pytest.mark.parametrize("power", [-120, 120])
def test_sizes_do_not_matter(power: int) -> None:
    att, s = random_attention("plain"), 2.0**power
    other = changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s, w_v=att.w_v * s)
    close(lb.frobenius_norm(other) / s, lb.frobenius_norm(att))
    close(lb.condition_number(other), lb.condition_number(att), 1e-6)


def test_where_there_is_no_number() -> None:
    """Without values all is zero and the condition infinite; or rounding hides them."""
    att = random_attention("plain")
    zero, huge = changed(att, w_v=0 * att.w_v), changed(att, w_q=1e18 * att.w_q)
    assert not bool(lb.frobenius_norm(zero).any())
    assert bool(lb.condition_number(zero).isinf().all())
    assert bool(lb.frobenius_norm(huge).isnan().all())
    assert not bool(lb.condition_number(huge).isfinite().any())


def test_a_layer_without_closed_form_is_the_same_by_its_module() -> None:
    model = build(AFFINE["bert"]).double()
    inputs = inputs_for(model)
    (closed, *_) = Capturer(model, [0]).each(inputs)
    (module, *_) = Capturer(model, [0], closed=False).each(inputs)
    for measure, rel in ((lb.frobenius_norm, 1e-9), (lb.condition_number, 1e-4)):
        close(measure(module.attention), measure(closed.attention), rel)


def test_what_is_too_large_or_unknown_is_refused() -> None:
    w = torch.ones(1, 8, 4)
    att = Attention(torch.ones(1, 300, 8), w, w, w)
    refused(partial(lb.condition_number, att), "with 1,200 outputs ", " up to 1,024; give shorter")
    assert bool(lb.frobenius_norm(att).isfinite().all())
    refused(partial(lb.frobenius_norm, att, map="residual"), "unknown map 'residual'")
    refused(partial(lb.condition_number, 3), "condition_number was given is 3")
