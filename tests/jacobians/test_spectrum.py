"""Frobenius norms, condition numbers, and the largest singular values with their vectors, against
dense autograd Jacobians of the definition."""

from functools import partial

import pytest
import torch
from support.checks import close, refused
from support.layers import changed, in_units, random_attention
from support.models import AFFINE, build, inputs_for
from support.oracles import matrices
from support.variants import cross
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound.models.capture.capture import Capturer

HAS = ((), ("rotation",), ("together", "rotation"), ("cap", "sinks"), ("values",), ("latent",))
HAS = (*HAS, ("gate",), ("gate", "norm"))


def check(att: lb.Attention, map: str = "head", k: int = 5) -> lb.SingularValues:
    """All numbers of a layer: values between their ends, and residuals that hold."""
    frobenius, condition = lb.frobenius_norm(att, map=map), lb.condition_number(att, map=map)
    assert frobenius.dtype == condition.dtype == torch.float64
    found = lb.singular_values(att, k, map=map)
    assert found.left.dtype == found.right.dtype == att.dtype
    assert bool(found.converged.all())
    for s in range(att.samples):
        every = torch.linalg.svdvals(matrices(att, s, map))  # (heads or 1, values)
        close(frobenius[s].view(-1), every.norm(dim=1))
        # of an output projection that is wider than a head, the other values are zero
        n = every.shape[1] * (att.d_v if map == "head_out" else 1)
        smallest = every[:, n // (att.w_o.shape[2] if map == "head_out" else 1) - 1]
        for ratio, value in zip(smallest / every[:, 0], condition[s].view(-1), strict=True):
            if ratio > 1e-6 or value < torch.inf:
                assert float(value) == pytest.approx(float(1 / ratio), rel=0.02)
        true = torch.nn.functional.pad(every, (0, max(0, k - every.shape[-1])))
        values, lower, residual, cluster = (t[s].view(-1, k) for t in found[:4])
        size = true[:, :1]
        assert bool(((values - true[:, :k]).abs() <= 1e-7 * size).all())
        assert bool((lower <= true[:, :k] + 1e-14 * size).all())
        assert bool((lower >= values - 1e-6 * size).all())
        for h, i in zip(*torch.where(values > residual), strict=True):
            assert float((true[h] - values[h, i]).abs().min()) <= float(residual[h, i])
        for h in range(len(values)):
            for number in range(int(cluster[h].max()) + 1):
                some = torch.where(cluster[h] == number)[0]
                reach = residual[h, some].norm() + 1e-14 * size[h]
                if bool((values[h, some] > reach).all()):
                    low, high = values[h, some[-1]] - reach, values[h, some[0]] + reach
                    assert int(((true[h] >= low) & (true[h] <= high)).sum()) >= len(some)
    return found


def test_kinds(kind: str) -> None:
    for dtype in (torch.float64, torch.float32):
        check(random_attention(kind, dtype=dtype))


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
@pytest.mark.parametrize("kind", ["biases", "padded", "wide_values"])
def test_maps(kind: str, map: str) -> None:
    check(random_attention(kind), map)


@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
@pytest.mark.parametrize("has", HAS)
def test_variants(has: tuple[str, ...], mask: str) -> None:
    check(variant_layer(1, frozenset(has), mask=mask))


@pytest.mark.parametrize("stream", ["queries", "memory"])
def test_both_streams_of_cross_attention(stream: str) -> None:
    check(cross(0, stream))


@pytest.mark.parametrize("map", ["head", "head_out"])
def test_vectors_are_singular_pairs_of_the_dense_jacobian(map: str) -> None:
    att = random_attention("biases")
    found = lb.singular_values(att, 4, map=map, tol=1e-9)
    for s in range(att.samples):
        for h, j in enumerate(matrices(att, s, map)):
            left, right = found.left[s, h].flatten(1), found.right[s, h].flatten(1)
            values = found.values[s, h][:, None]
            close(right @ j.mT, values * left, 0, 1e-8 * float(values[0]))
            close(left @ j, values * right, 0, 1e-8 * float(values[0]))
            for some in (left, right):
                close(some @ some.mT, torch.eye(4).double(), 0, 1e-10)


def test_a_multiple_value_is_found_as_often_as_it_occurs_and_told() -> None:
    """Equal tokens: J = (1/N) 1 1^T x W_V^T, here with singular values 3, 3, 3 and 1."""
    att = random_attention("plain").select(slice(0, 1), slice(0, 1))
    w_v = torch.linalg.qr(att.w_v)[0] * torch.tensor([3.0, 3, 3, 1]).double()
    found = check(changed(att, x=att.x[:, :1].expand_as(att.x).contiguous(), w_v=w_v), k=6)
    values, cluster = found.values[0, 0], found.cluster[0, 0].tolist()
    assert values.tolist() == pytest.approx([3, 3, 3, 1, 0, 0], abs=1e-7)
    assert cluster[0] == cluster[1] == cluster[2] != cluster[3] != cluster[4]


def test_values_that_are_zero() -> None:
    """Of a head of less than full rank, and more than a matrix has."""
    att = random_attention("plain")
    found = check(changed(att, w_v=att.w_v[:, :, :1].expand_as(att.w_v).contiguous()), k=10)
    assert bool((found.lower[..., 6:] == 0).all())
    found = check(random_attention("one_token"), k=7)
    assert not bool(found.values[..., 4:].any())
    assert bool((found.values[..., :4] > 0).all())


def test_the_first_is_the_norm() -> None:
    att = random_attention("biases")
    norm, found = lb.spectral_norm(att, delta=1e-6), lb.singular_values(att, 1)
    assert bool((found.lower[..., 0] <= norm.upper).all())
    assert bool((found.values[..., 0] >= norm.lower * (1 - 1e-9)).all())


@pytest.mark.parametrize("power", [-120, 120])
def test_sizes_do_not_matter(power: int) -> None:
    att, s = random_attention("plain"), 2.0**power
    other = in_units(att, x=power, w_q=-power, w_k=-power, w_v=power)
    close(lb.frobenius_norm(other) / s, lb.frobenius_norm(att))
    close(lb.condition_number(other), lb.condition_number(att), 1e-6)
    close(lb.singular_values(other, 3).values / s, lb.singular_values(att, 3).values)


def test_where_there_is_no_number() -> None:
    """Without values all is zero and the condition infinite; or rounding hides everything, and
    nothing is claimed."""
    att = random_attention("plain")
    zero, huge = changed(att, w_v=0 * att.w_v), changed(att, w_q=1e18 * att.w_q)
    found = lb.singular_values(zero, 3)
    for nothing in (lb.frobenius_norm(zero), found.values, found.lower):
        assert not bool(nothing.any())
    assert bool(lb.condition_number(zero).isinf().all())
    assert bool(lb.frobenius_norm(huge).isnan().all())
    assert not bool(lb.condition_number(huge).isfinite().any())
    found, true = lb.singular_values(huge, 2), torch.linalg.svdvals(matrices(huge, 0))
    assert bool((found.lower[0] <= true[:, :2]).all())
    assert not bool(found.converged.all())


def test_a_layer_without_closed_form() -> None:
    """The same by its module, but for singular values."""
    model = build(AFFINE["bert"]).double()
    inputs = inputs_for(model)
    (closed, *_) = Capturer(model, [0]).each(inputs)
    (module, *_) = Capturer(model, [0], closed=False).each(inputs)
    for measure, rel in ((lb.frobenius_norm, 1e-9), (lb.condition_number, 1e-4)):
        close(measure(module.attention), measure(closed.attention), rel)
    refused(partial(lb.singular_values, module.attention), "needs a layer in closed form")


def test_what_is_too_large_or_unknown_is_refused() -> None:
    w, att = torch.ones(1, 8, 4), random_attention("plain")
    long = lb.Attention(torch.ones(1, 300, 8), w, w, w)
    assert bool(lb.frobenius_norm(long).isfinite().all())
    calls = {
        partial(lb.condition_number, long): ("with 1,200 outputs ", " up to 1,024; give shorter"),
        partial(lb.condition_number, 3): ("condition_number was given is 3",),
        partial(lb.frobenius_norm, att, map="residual"): ("unknown map 'residual'",),
        partial(lb.singular_values, att, map="residual"): ("unknown map 'residual'",),
        partial(lb.singular_values, att, 0): ("k is 0",),
        partial(lb.singular_values, att, tol=0): ("tol is 0",),
        partial(lb.singular_values, 3): ("singular_values was given is 3",),
    }
    for call, words in calls.items():
        refused(call, *words)
