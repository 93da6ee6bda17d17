"""Bounds over balls and the adversary for rotary, capped and sink heads: against dense Jacobians all over the ball."""

import math

import pytest
import torch
from conftest import causal, random_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from variants import MASKS, layer, oracle

import lipbound as lb
from lipbound import balls, bounds
from lipbound.attention import Attention
from lipbound.bounds.around import Around
from lipbound.bounds.ball_variants import VariantAround, norm_a
from lipbound.errors import AttentionError
from lipbound.linalg import matrix_norm
from lipbound.operators import HeadJacobian, dense_jacobian
from lipbound.passage import QKNorm
from lipbound.rotation import Rotation

NORMS = ("token", "frobenius")
PROVED = st.frozensets(st.sampled_from(("rotation", "cap", "sinks")))


def moves(att: Attention, norm: str, radius: float, count: int, seed: int) -> list[Tensor]:
    """Inputs of the ball around an unpadded layer, half of them on its boundary; the last moves one token only."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        move = torch.randn(att.x.shape, generator=g, dtype=torch.float64)
        if i == count - 1:
            move[:, 1:] = 0
        size = move.norm(dim=-1, keepdim=True).clamp_min(1e-300) if norm == "token" else move.norm()
        part = 1.0 if i % 2 else float(torch.rand((), generator=g))
        out.append(att.x + part * radius * (1 - 1e-12) * move / size)
    return out


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6), has=PROVED, mask=st.sampled_from(MASKS), n=st.integers(1, 6), d=st.integers(2, 5), d_v=st.integers(1, 4),
    scale=st.sampled_from([1e-2, 0.3, 1.0, 10.0]), radius=st.sampled_from([0.0, 1e-4, 1e-2, 0.1, 0.5, 2.0, 10.0]), norm=st.sampled_from(NORMS),
    biases=st.booleans(), same=st.booleans(),
)  # fmt: skip
def test_no_point_of_the_ball_is_above(
    seed: int, has: frozenset[str], mask: str, n: int, d: int, d_v: int, scale: float, radius: float, norm: str, biases: bool, same: bool
) -> None:
    att = layer(seed, has, mask=mask, n=n, d=d, d_v=d_v, scale=scale, biases=biases, same=same).select(heads=slice(0, 2))
    bound = bounds.over_ball(att, radius, norm=norm)
    assert bool((bound >= oracle(att) * (1 - 1e-9)).all())
    one, own = att.unpadded(1), bound[1]
    for x in moves(one, norm, radius, 8, seed):
        assert bool((own >= oracle(one.at(x))[0] * (1 - 1e-9)).all())
    # moves along the gradient of the norm, to the boundary
    top = lb.spectral_norm(one, tol=1e-6, vectors=True)
    for h in range(2):
        x = one.x.clone().requires_grad_()
        part = one.select(heads=slice(h, h + 1))
        (up,) = torch.autograd.grad((top.left[:, h] * HeadJacobian(part.at(x)).along(top.right[:, h])).sum(), x)
        up = up / up.abs().amax().clamp_min(1e-300)  # gradients at one-hot rows are so small that their squares vanish
        up = up / (up.norm(dim=-1, keepdim=True) if norm == "token" else up.norm()).clamp_min(1e-100)
        for sign in (1, -1):
            there = part.at(one.x + sign * radius * (1 - 1e-12) * up)
            assert bool(own[h] >= oracle(there)[0, 0] * (1 - 1e-9))
