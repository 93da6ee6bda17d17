"""Rotary position embeddings: vectors that are turned, and what does not know of them."""

import math
from functools import partial

import castin_inputs
import pytest
import torch
from support.checks import normal, refused
from support.variants import layer

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.attention.variants.rotary import Rotation, turned
from lipbound.jacobians.spectral_norm import l2_spectral_norm

ROTARY = frozenset({"rotation"})


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_are_turned_alike_with_and_without_derivatives(r: int, dtype: torch.dtype) -> None:
    draw, of_tokens, of_each = normal(r, dtype), (5, r), (5, 1, r)
    shapes = {(2, 3, 5, 6): of_tokens, (1, 4, 6): of_each, (5, 4, 6): of_each, (0, 5, 6): of_tokens}
    for shape, angles in shapes.items():
        y, a = draw(*shape), draw(*angles)
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
    every = map(lb.bounds.get, lb.bounds.names())
    for call in (
        *(bound for bound in every if not bound.applies(att)),
        partial(adversarial_inputs.lower_bound, tokens=4, radius=1.0),
        castin_inputs.large_radius_limit,
        partial(mean_field.weighted_norm, weights=torch.full((2, 5), 0.2, dtype=torch.float64)),
        mean_field.query_block_norms,
        l2_spectral_norm,
        partial(lb.bounds.get("castin_bias").over_ball, radius=0.1),
    ):
        refused(partial(call, att), "does not cover rotary", error=lb.errors.AttentionError)


def test_bad_rotations() -> None:
    ones, att = torch.ones(3, 2), layer(1, ROTARY)
    for cos, sin, words in (
        (ones[:, 0], ones[:, 0], "must be (N, r)"),
        (ones, ones[:, :1], "must be (N, r)"),
        (ones * math.nan, ones, "NaN or infinite"),
    ):
        refused(partial(Rotation, cos, sin), words)
    for shape in ((4, 2), (5, 3)):
        bad, words = Rotation.of_angles(torch.zeros(shape)), "of 5 tokens and turn at most 4"
        refused(partial(att.with_parts, rotation=bad), words, error=lb.errors.AttentionError)
