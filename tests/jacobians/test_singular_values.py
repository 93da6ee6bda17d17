"""The largest singular values and their vectors, against dense autograd Jacobians."""

from functools import partial

import pytest
import torch
from support.checks import refused
from support.layers import changed, random_attention
from support.models import AFFINE, build, inputs_for
from support.oracles import jacobians, matrices
from support.variants import cross
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.models.capture.capture import Capturer

HAS = ((), ("rotation",), ("together", "rotation"), ("cap", "sinks"), ("values",), ("gate", "norm"))


def check(att: Attention, map: str = "head", k: int = 5) -> lb.SingularValues:
    """Values between their ends, and residuals that hold, for every sample of a layer."""
    found = lb.singular_values(att, k, map=map)
    assert bool(found.converged.all())
    for s in range(att.samples):
        true = torch.linalg.svdvals(matrices(att, s, map))
        true = torch.nn.functional.pad(true, (0, max(0, k - true.shape[-1])))
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
                    within = (true[h] >= values[h, some[-1]] - reach) & (
                        true[h] <= values[h, some[0]] + reach
                    )
                    assert int(within.sum()) >= len(some)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "biases", "padded", "causal", "duplicates", "sharp"])
def test_kinds(kind: str, dtype: torch.dtype) -> None:
    att = random_attention(kind, dtype=dtype)
    found = check(att)
    assert found.left.dtype == found.right.dtype == dtype


@pytest.mark.parametrize("map", ["head_out", "heads", "layer"])
@pytest.mark.parametrize("kind", ["biases", "padded", "wide_values"])
def test_maps(kind: str, map: str) -> None:
    check(random_attention(kind), map)


@pytest.mark.parametrize("has", HAS)
def test_variants(has: tuple[str, ...]) -> None:
    check(variant_layer(1, frozenset(has), mask="causal"))


def test_both_streams_of_cross_attention() -> None:
    for stream in ("queries", "memory"):
        check(cross(0, stream))


@pytest.mark.parametrize("map", ["head", "head_out"])
def test_vectors_are_singular_pairs_of_the_dense_jacobian(map: str) -> None:
    att = random_attention("biases")
    found = lb.singular_values(att, 4, map=map, tol=1e-9)
    for s in range(att.samples):
        for h, j in enumerate(matrices(att, s, map)):
            left, right = found.left[s, h].flatten(1), found.right[s, h].flatten(1)
            values = found.values[s, h][:, None]
            assert bool(torch.allclose(right @ j.mT, values * left, atol=1e-8 * float(values[0])))
            assert bool(torch.allclose(left @ j, values * right, atol=1e-8 * float(values[0])))
            for some in (left, right):
                assert bool(torch.allclose(some @ some.mT, torch.eye(4).double(), atol=1e-10))


def test_a_multiple_value_is_found_as_often_as_it_occurs_and_told() -> None:
    """Equal tokens: J = (1/N) 1 1^T x W_V^T, here with singular values 3, 3, 3 and 1."""
    att = random_attention("plain").select(slice(0, 1), slice(0, 1))
    w_v = torch.linalg.qr(att.w_v)[0] * torch.tensor([3.0, 3, 3, 1]).double()
    found = check(changed(att, x=att.x[:, :1].expand_as(att.x).contiguous(), w_v=w_v), k=6)
    values, cluster = found.values[0, 0], found.cluster[0, 0].tolist()
    assert values.tolist() == pytest.approx([3, 3, 3, 1, 0, 0], abs=1e-7)
    assert cluster[0] == cluster[1] == cluster[2] != cluster[3] != cluster[4]


def test_a_rank_deficient_head_has_zeros() -> None:
    att = random_attention("plain")
    found = check(changed(att, w_v=att.w_v[:, :, :1].expand_as(att.w_v).contiguous()), k=10)
    assert bool((found.lower[..., 6:] == 0).all())
    nothing = lb.singular_values(changed(att, w_v=0 * att.w_v), 3)
    assert not bool(nothing.values.any())
    assert not bool(nothing.lower.any())


def test_more_values_than_a_matrix_has_are_zero() -> None:
    att = random_attention("one_token")
    found = check(att, k=7)
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
    other = changed(att, x=att.x * s, w_q=att.w_q / s, w_k=att.w_k / s, w_v=att.w_v * s)
    torch.testing.assert_close(
        lb.singular_values(other, 3).values / s,
        lb.singular_values(att, 3).values,
        rtol=1e-9,
        atol=0,
    )


def test_where_rounding_hides_everything_nothing_is_claimed() -> None:
    att = random_attention("plain")
    found = lb.singular_values(changed(att, w_q=1e18 * att.w_q), 2)
    true = torch.linalg.svdvals(jacobians(changed(att, w_q=1e18 * att.w_q), 0)[:, 0].flatten(0, 1))
    assert bool((found.lower[0, 0] <= true[:2]).all())
    assert not bool(found.converged.all())


def test_what_it_does_not_take_is_refused() -> None:
    att = random_attention("plain")
    refused(partial(lb.singular_values, att, 0), "k is 0")
    refused(partial(lb.singular_values, att, map="residual"), "unknown map 'residual'")
    refused(partial(lb.singular_values, att, tol=0), "tol is 0")
    refused(partial(lb.singular_values, 3), "singular_values was given is 3")
    model = build(AFFINE["bert"])
    (module, *_) = Capturer(model, [0], closed=False).each(inputs_for(model))
    refused(partial(lb.singular_values, module.attention), "needs a layer in closed form")
