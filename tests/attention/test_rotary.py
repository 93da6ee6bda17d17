"""Rotary position embeddings: vectors that are turned, and what does not know of them."""

import math

import castin_inputs
import pytest
import torch
from support.variants import layer

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.errors import AttentionError, LipboundError
from lipbound.jacobians.spectral_norm import l2_spectral_norm

ROTARY = frozenset({"rotation"})


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_are_turned_alike_with_and_without_derivatives(r: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(r)
    shapes = [(2, 3, 5, 6), (1, 4, 6), (5, 4, 6), (0, 5, 6)]
    for shape, angles in zip(shapes, [(5, r), (5, 1, r), (5, 1, r), (5, r)], strict=True):
        y, a = (torch.randn(size, generator=g, dtype=dtype) for size in (shape, angles))
        before = y.clone()
        with torch.no_grad():
            found = turned(y, a.cos(), a.sin())
        assert torch.equal(y, before)
        torch.testing.assert_close(found, turned(y, a.cos(), a.sin()))


def test_terms_of_turned_heads() -> None:
    att = layer(5, ROTARY, mask="padded")
    assert lb.bounds.get("lipbound").terms(att) is None
    assert lb.bounds.get("kim").terms(att) is None
    assert set(lb.bounds.get("castin_bias").terms(att)) == {"values", "softmax"}


def test_what_does_not_know_of_rotations_refuses_them() -> None:
    att = layer(1, ROTARY)
    for name in lb.bounds.names():
        if not lb.bounds.get(name).applies(att):
            with pytest.raises(AttentionError, match="does not cover rotary"):
                lb.bounds.get(name)(att)
    for call in (
        lambda: adversarial_inputs.lower_bound(att, 4, 1.0),
        lambda: castin_inputs.large_radius_limit(att),
        lambda: mean_field.weighted_norm(att, torch.full((2, 5), 0.2, dtype=torch.float64)),
        lambda: mean_field.query_block_norms(att),
        lambda: l2_spectral_norm(att),
        lambda: lb.bounds.get("castin_bias").over_ball(att, 0.1),
    ):
        with pytest.raises(AttentionError, match="does not cover rotary"):
            call()


def test_bad_rotations() -> None:
    for cos, sin in (
        (torch.ones(3), torch.ones(3)),
        (torch.ones(3, 2), torch.ones(3, 1)),
        (torch.full((3, 2), math.nan), torch.ones(3, 2)),
    ):
        with pytest.raises(LipboundError, match=r"must be \(N, r\)|NaN or infinite"):
            Rotation(cos, sin)
    att = layer(1, ROTARY)
    for bad in (Rotation.of_angles(torch.zeros(4, 2)), Rotation.of_angles(torch.zeros(5, 3))):
        with pytest.raises(AttentionError, match="it must be of 5 tokens and turn at most 4"):
            att.with_parts(rotation=bad)
