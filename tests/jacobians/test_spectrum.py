"""Frobenius norms and condition numbers, against dense autograd Jacobians of the definition."""

import pytest
import torch
from support.layers import changed, random_attention
from support.models import AFFINE, build, inputs_for
from support.oracles import jacobians
from support.variants import cross
from support.variants import layer as variant_layer
from torch import Tensor

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.models.capture.capture import Capturer

HAS = ((), ("rotation",), ("together", "rotation"), ("cap", "sinks"), ("values",), ("latent",))
HAS = (*HAS, ("gate",), ("gate", "norm"))


def singular_values(att: Attention, map: str = "head") -> list[list[Tensor]]:
    """Of every sample and head (or sample), from the Jacobian of the definition; no padding."""
    found = []
    for s in range(att.samples):
        j = jacobians(att.double(), s)  # (n, heads, d_v, n D)
        if map == "heads":
            each = [j.flatten(0, 2)]
        elif map == "layer":
            assert att.w_o is not None
            each = [torch.einsum("nhvx,hvo->nox", j, att.w_o.double()).flatten(0, 1)]
        else:
            each = list(j.transpose(0, 1).flatten(1, 2))
            if map == "head_out":
                assert att.w_o is not None
                blocks = j.transpose(0, 1)
                each = list(torch.einsum("hnvx,hvo->hnox", blocks, att.w_o.double()).flatten(1, 2))
        found.append([torch.linalg.svdvals(one) for one in each])
    return found


def check(att: Attention, map: str = "head") -> None:
    """Both numbers of a layer."""
    frobenius, condition = lb.frobenius_norm(att, map=map), lb.condition_number(att, map=map)
    assert frobenius.dtype == condition.dtype == torch.float64
    for s, row in enumerate(singular_values(att, map)):
        for h, values in enumerate(row):
            place = (s,) if map in ("heads", "layer") else (s, h)
            exact = float(values.square().sum().sqrt())
            assert float(frobenius[place]) == pytest.approx(exact, rel=1e-9)
            # of an output projection that is wider than a head, the other values are zero
            n = len(values) if map != "head_out" else len(values) * att.d_v // att.w_o.shape[2]
            smallest = float(values[n - 1] / values[0])
            value = float(condition[place])
            if smallest > 1e-6 or value < torch.inf:
                assert value == pytest.approx(1 / smallest, rel=0.02)


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
    torch.testing.assert_close(lb.frobenius_norm(att), lb.frobenius_norm(att.double()))


@pytest.mark.parametrize("power", [-120, 120])
def test_sizes_do_not_matter(power: int) -> None:
    att, s = random_attention("plain"), 2.0**power
    other = changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s, w_v=att.w_v * s)
    torch.testing.assert_close(
        lb.frobenius_norm(other) / s, lb.frobenius_norm(att), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        lb.condition_number(other), lb.condition_number(att), rtol=1e-6, atol=0
    )


def test_without_values_everything_is_zero_and_the_condition_infinite() -> None:
    att = changed(random_attention("plain"), w_v=0 * random_attention("plain").w_v)
    assert not bool(lb.frobenius_norm(att).any())
    assert bool(lb.condition_number(att).isinf().all())


def test_where_rounding_hides_them_there_is_no_number() -> None:
    att = random_attention("plain")
    huge = changed(att, w_q=1e18 * att.w_q)
    assert bool(lb.frobenius_norm(huge).isnan().all())
    assert not bool(lb.condition_number(huge).isfinite().any())


def test_a_layer_without_closed_form_is_the_same_by_its_module() -> None:
    model = build(AFFINE["bert"]).double()
    inputs = inputs_for(model)
    (closed, *_) = Capturer(model, [0]).each(inputs)
    (module, *_) = Capturer(model, [0], closed=False).each(inputs)
    for measure, rel in ((lb.frobenius_norm, 1e-9), (lb.condition_number, 1e-4)):
        torch.testing.assert_close(
            measure(module.attention), measure(closed.attention), rtol=rel, atol=0
        )


def test_what_is_too_large_or_unknown_is_refused() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 300, 8), (1, 8, 4), (1, 8, 4), (1, 8, 4)]
    att = Attention(*(torch.randn(shape, generator=g) for shape in shapes))
    with pytest.raises(LipboundError, match=r"with 1,200 outputs .* up to 1,024; give shorter"):
        lb.condition_number(att)
    assert bool(lb.frobenius_norm(att).isfinite().all())
    with pytest.raises(LipboundError, match="unknown map 'residual'"):
        lb.frobenius_norm(att, map="residual")
    with pytest.raises(LipboundError, match="condition_number was given is 3"):
        lb.condition_number(3)  # type: ignore[arg-type]
