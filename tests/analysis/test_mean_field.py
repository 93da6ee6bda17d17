"""Weighted attention and copies of tokens, against dense Jacobians."""

import itertools
import math

import castin_inputs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close
from support.layers import causal, normal, random_attention
from support.oracles import oracle
from support.strategies import examples

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field


def weighted_oracle(att: lb.Attention, a: torch.Tensor) -> torch.Tensor:
    """Norms of weighted self-attention by its definition: autograd of softmax(scores) with weights,
    in the weighted norm, (heads,)."""
    norms = []
    for h in range(att.heads):

        def f(x: torch.Tensor, h: int = h) -> torch.Tensor:
            b_q = 0 if att.b_q is None else att.b_q[h]
            s = att.scale * (x @ att.w_q[h] + b_q) @ (x @ att.w_k[h]).mT
            e = a * (s - s.amax(-1, keepdim=True)).exp()
            return (e / e.sum(-1, keepdim=True)) @ (x @ att.w_v[h])

        j = torch.func.jacrev(f)(att.x[0])
        j = a.sqrt()[:, None, None, None] * j / a.sqrt()[None, None, :, None]
        norms.append(torch.linalg.matrix_norm(j.flatten(2).flatten(0, 1), 2))
    return torch.stack(norms)


def simplex(n: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Positive weights that add up to one."""
    return torch.softmax(spread * normal(seed)(1, n), -1)


@examples(40)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 6))
def test_weighted_norm_against_autograd(seed: int, spread: float) -> None:
    att = random_attention("biases" if seed % 2 else "plain", seed).select(slice(0, 1))
    a = simplex(att.tokens, seed, spread)
    found = mean_field.weighted_norm(att, a, tol=1e-9)
    close(found.lower[0], weighted_oracle(att, a[0]), 1e-6, 1e-9)


def test_equal_weights_are_attention() -> None:
    att = random_attention("plain")
    a = torch.full((2, att.tokens), 1 / att.tokens, dtype=torch.float64)
    close(mean_field.weighted_norm(att, a, tol=1e-9).lower, oracle(att), 1e-7)


def test_weights_are_copies() -> None:
    """Weights in whole numbers are what copies of tokens give to perturbations that are the same
    for all copies; others add B_i."""
    att = random_attention("plain", 5).select(slice(0, 1))
    counts = torch.tensor([1, 2, 3, 1, 2, 2])
    copied = lb.Attention(att.x.repeat_interleave(counts, 1), att.w_q, att.w_k, att.w_v)
    a = (counts / counts.sum())[None].double()
    weighted = mean_field.weighted_norm(att, a, tol=1e-9).lower
    own = mean_field.query_block_norms(mean_field.weighted(att, a))[..., counts > 1].amax(-1)
    close(oracle(copied), torch.maximum(weighted, own), 1e-7)


def test_two_diracs_grow_as_predicted() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    for seed in range(6):
        draw = normal(seed)
        w_q, w_k = draw(1, 3, 3), draw(1, 3, 3)
        att = lb.Attention(eye[None], w_q, w_k, eye[None])
        steep = adversarial_inputs.steepness(att)
        gamma, value = float(steep.gamma[0]), float(steep.eigenvalue[0])
        if gamma < 0.05:
            continue
        for scaling in (6.0, 12.0, 20.0):
            radius = math.sqrt(scaling / gamma)
            x, a = castin_inputs.two_diracs(steep.direction[0], value, radius)
            pair = lb.Attention(x[None], w_q, w_k, eye[None])
            exact = float(mean_field.weighted_norm(pair, a[None], tol=1e-9).lower)
            image = att.scale * w_k[0] @ w_q[0].mT @ steep.direction[0]
            predicted = castin_inputs.two_dirac_growth(value, radius, steep.direction[0], image)
            assert exact == pytest.approx(predicted, rel=1e-3)
            assert predicted >= math.exp(scaling) * (1 + scaling) / 2 * (1 - 1e-12)
            assert exact <= float(lb.bounds.get("castin_mean_field")(pair)[0, 0])


def test_query_blocks_against_autograd() -> None:
    """B_i is the derivative of output i with respect to its own query alone, times W_Q^T."""
    att = random_attention("biases", 2)
    found = mean_field.query_block_norms(att)
    for s, h, i in itertools.product(*map(range, found.shape)):
        k, v = att.k[s, h], att.v[s, h]
        out = lambda q, k=k, v=v: torch.softmax(att.scale * q @ k.mT, -1) @ v  # noqa: E731
        block = torch.func.jacrev(out)(att.q[s, h, i]) @ att.w_q[h].mT
        expected = float(torch.linalg.matrix_norm(block, 2))
        assert float(found[s, h, i]) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("copies", [2, 3])
def test_duplicated_norm_is_exact(copies: int) -> None:
    for seed in range(60):
        kind = ("plain", "biases", "sharp", "flat", "causal")[seed % 5]
        att = random_attention(kind, seed).select(slice(0, 1))
        mask = None if att.mask is None else causal(att.tokens)
        for axis in (0, 1):
            mask = None if mask is None else mask.repeat_interleave(copies, axis)
        parts = {"b_q": att.b_q, "b_k": att.b_k, "b_v": att.b_v, "mask": mask}
        x = att.x.repeat_interleave(copies, 1)
        exact = oracle(lb.Attention(x, att.w_q, att.w_k, att.w_v, **parts))
        mine = mean_field.duplicated_norm(att, oracle(att))
        close(mine, exact, 1e-12)
