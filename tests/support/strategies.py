"""Random, degenerate and adversarial small layers for property tests, and how many of them a test
draws."""

import os
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from support.layers import causal, window
from torch import Tensor

from lipbound.attention.layer import Attention

INPUTS = ("plain", "duplicates", "pairs", "collinear", "outlier", "tiny", "huge", "zero")
WEIGHTS = ("plain", "tied", "no_query", "one_hot", "rank_one_values")
MASKS = ("none", "causal", "window", "offsets", "padded")
MODERATE = {
    "inputs": ("plain", "duplicates", "pairs", "collinear", "tiny"),
    "weights": ("plain", "tied", "no_query", "rank_one_values"),
}
"""Families of `layers` without huge inputs and one-hot attention."""
SHARE = "LIPBOUND_TESTS_SHARE"
"""Environment variable: the share of every property's examples that are drawn, 1 unless said
otherwise; `make test` draws a tenth."""


def part(count: int, least: int = 5) -> int:
    """How many of so many examples are drawn: the first of them, and not fewer than ``least``."""
    return min(count, max(least, round(count * float(os.environ.get(SHARE, "1")))))


SAMPLES, HEADS = part(6, 3), part(10)
"""Inputs and heads of one of `layers`; in `make test` half of them."""


def examples(count: int) -> Callable[[Any], Any]:
    """Settings of a property test: so many examples, the same ones every time, or the first of
    them."""
    return settings(max_examples=part(count), deadline=None, derandomize=True)


@st.composite
def layers(
    draw: st.DrawFn,
    dtype: torch.dtype = torch.float64,
    inputs: tuple[str, ...] = INPUTS,
    weights: tuple[str, ...] = WEIGHTS,
) -> Attention:
    """Layers of one shape at once: `SAMPLES` inputs x `HEADS` heads, each input and each head of a
    family and a size of its own.

    Up to 8 tokens, logits from uniform to one-hot, any mask, with or without biases.
    """
    seed, mask = draw(st.integers(0, 2**31)), draw(st.sampled_from(MASKS))
    n, width = draw(st.integers(1, 8)), draw(st.integers(2, 12))
    d, d_v = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    biased = draw(st.booleans())
    g = torch.Generator().manual_seed(seed)
    x = torch.stack([_input(inputs[k], n, width, g) for k in _chosen(inputs, SAMPLES, g)])
    heads = [_head(weights[k], width, d, d_v, g) for k in _chosen(weights, HEADS, g)]
    w_q, w_k, w_v = (torch.stack(parts) for parts in zip(*heads, strict=True))
    extra: dict[str, Tensor] = {}
    if biased:
        sizes = {"b_q": (d, -1, 1.5), "b_k": (d, -1, 1.5), "b_v": (d_v, -1, 2)}
        extra = {
            name: torch.stack([_normal(g, k) * _power(g, low, high) for _ in range(HEADS)])
            for name, (k, low, high) in sizes.items()
        }
    if mask in ("causal", "padded"):
        extra["mask"] = causal(n)
    if mask == "window":
        extra["mask"] = window(n)
    if mask == "offsets":
        extra["mask"] = _normal(g, 1, HEADS, n, n)
    if mask == "padded":
        lengths = torch.tensor([n, max(1, n - 1), 1] * (SAMPLES // 3))
        extra["valid"] = torch.arange(n).expand(SAMPLES, n) < lengths[:, None]
    return Attention(
        *(t.to(dtype) for t in (x, w_q, w_k, w_v)),
        **{k: t if t.dtype == torch.bool else t.to(dtype) for k, t in extra.items()},
    )


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def _power(g: torch.Generator, low: float, high: float) -> float:
    """A size, uniform in its logarithm."""
    return 10 ** (low + (high - low) * float(torch.rand((), generator=g)))


def _chosen(families: tuple[str, ...], count: int, g: torch.Generator) -> list[int]:
    """Families in turn from a random one on: of so many, none is left out twice in a row."""
    first = int(torch.randint(len(families), (), generator=g))
    return [(first + k) % len(families) for k in range(count)]


def _input(family: str, n: int, width: int, g: torch.Generator) -> Tensor:
    """One sample, (n, width)."""
    x = _normal(g, n, width) * _power(g, -1, 1)
    if family == "duplicates":
        x = x[:1].expand(n, -1).clone()
    if family == "pairs" and n > 1:
        x[n // 2 :] = x[: n - n // 2].clone()
    if family == "collinear":
        x = x[:1] * torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
    if family == "outlier":
        x[0] *= 50
    return x * {"tiny": 1e-6, "huge": 1e6, "zero": 0.0}.get(family, 1.0)


def _head(
    family: str, width: int, d: int, d_v: int, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one head: (width, d), (width, d), (width, d_v)."""
    w_q = _normal(g, width, d) * _power(g, -2, 1.2) / width**0.5
    w_k = w_q.clone() if family == "tied" else _normal(g, width, d) / width**0.5
    if family == "rank_one_values":
        w_v = _normal(g, width, 1) @ _normal(g, 1, d_v)
    else:
        w_v = _normal(g, width, d_v)
    w_v = w_v * _power(g, -2, 2)
    return w_q * {"no_query": 0.0, "one_hot": 700.0}.get(family, 1.0), w_k, w_v
