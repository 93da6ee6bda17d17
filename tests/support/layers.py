"""Small attention layers of every kind."""

import math
from collections.abc import Callable
from itertools import product

import torch
from support.kinds import HARD as HARD
from support.kinds import KINDS as KINDS
from torch import Tensor

from lipbound.attention.layer import Attention


def normal(seed: int = 0, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """A source of normal numbers, of which ``draw(2, 3)`` takes the next."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def causal(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Additive causal mask, (n, n)."""
    return torch.zeros(n, n, dtype=dtype).masked_fill(torch.ones(n, n).triu(1) > 0, -math.inf)


def window(n: int, reach: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Additive sliding-window mask, (n, n)."""
    i = torch.arange(n)
    return torch.zeros(n, n, dtype=dtype).masked_fill((i[:, None] - i).abs() > reach, -math.inf)


def random_attention(
    kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, w_o: bool = True
) -> Attention:
    """A small layer of 2 samples x 3 heads of one of `KINDS`."""
    draw = normal(seed, dtype)
    samples, heads, n, width, d = 2, 3, 1 if kind == "one_token" else 6, 9, 4
    d_v = 7 if kind == "wide_values" else d
    x, w_q, w_k = draw(samples, n, width), draw(heads, width, d), draw(heads, width, d)
    w_v = draw(heads, width, d_v)
    extra: dict[str, Tensor | None] = {"w_o": draw(heads, d_v, width)} if w_o else {}
    if kind == "duplicates":
        x[:, 1:4] = x[:, :1]
    w_q = w_q * {"flat": 1e-3, "sharp": 30, "no_query": 0}.get(kind, 1)
    if kind in ("biases", "padded", "window"):
        b_q, b_k, b_v = 3 * draw(heads, d), 20 * draw(heads, d), 20 * draw(heads, d_v)
        extra |= {"b_q": b_q, "b_k": b_k, "b_v": b_v}
    if kind in ("causal", "padded"):
        extra["mask"] = causal(n, dtype)
    if kind == "window":
        extra["mask"] = window(n, 1, dtype)
    if kind == "offsets":
        extra["mask"] = draw(1, heads, n, n)
    if kind == "padded":
        extra["valid"] = torch.tensor([[True] * n, [True] * (n - 2) + [False] * 2])
    return Attention(x, w_q, w_k, w_v, **extra)


def in_units(att: Attention, **powers: int) -> Attention:
    """The layer with tensors, or its scale, in units of such powers of two."""
    parts = {name: getattr(att, name) for name in powers}
    return changed(att, **{name: t * 2.0 ** powers[name] for name, t in parts.items()})


def places(att: Attention) -> list[tuple[int, int]]:
    """Sample and head of every head at every sample."""
    return list(product(range(att.samples), range(att.heads)))


def query_bias_alone(*values: float) -> Attention:
    """Queries that come from their bias alone, so A = 0, while values differ by much: |J| grows
    with the bias."""
    x = torch.tensor([[[0.0, value] for value in values]], dtype=torch.float64)
    w_k, w_v = torch.tensor([[[1.0], [0.0]]]).double(), torch.eye(2, dtype=torch.float64)[None]
    return Attention(x, 0 * w_k, w_k, w_v, b_q=torch.tensor([[10.0]], dtype=torch.float64))


def changed(att: Attention, **parts: object) -> Attention:
    """The layer built anew with other arguments; what is not named stays, but for what is around
    it."""
    return att.with_parts(**{"surroundings": None} | parts)
