"""Random, degenerate and adversarial small layers for property tests, and the oracles of both maps."""

import torch
from hypothesis import strategies as st
from support.layers import causal, window
from torch import Tensor

from lipbound.attention.layer import Attention

FAMILIES = ("plain", "duplicates", "pairs", "collinear", "outlier", "tied", "no_query", "rank_one_values", "tiny", "huge", "one_hot", "zero")
MASKS = ("none", "causal", "window", "offsets", "padded")


@st.composite
def layers(draw: st.DrawFn, dtype: torch.dtype = torch.float64, families: tuple[str, ...] = FAMILIES) -> Attention:
    """A layer of 3 samples x 4 heads, up to 8 tokens, logits from uniform to one-hot, any mask, with or without biases."""
    seed = draw(st.integers(0, 2**31))
    family, mask = draw(st.sampled_from(families)), draw(st.sampled_from(MASKS))
    n, width, d, d_v = draw(st.integers(1, 8)), draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    biased = draw(st.booleans())
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def power(low: float, high: float) -> float:
        return 10 ** (low + (high - low) * float(torch.rand((), generator=g)))

    samples, heads = 3, 4
    x = normal(samples, n, width) * power(-1, 1)
    if family == "duplicates":
        x = x[:, :1].expand(-1, n, -1).clone()
    if family == "pairs" and n > 1:
        x[:, n // 2 :] = x[:, : n - n // 2].clone()
    if family == "collinear":
        x = x[:, :1] * torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]
    if family == "outlier":
        x[:, 0] *= 50
    x = x * {"tiny": 1e-6, "huge": 1e6, "zero": 0.0}.get(family, 1.0)
    w_q = normal(heads, width, d) * power(-2, 1.2) / width**0.5
    w_k = w_q.clone() if family == "tied" else normal(heads, width, d) / width**0.5
    w_v = normal(heads, width, d_v) * power(-2, 2)
    if family == "no_query":
        w_q = w_q * 0
    if family == "one_hot":
        w_q = w_q * 700
    if family == "rank_one_values":
        w_v = normal(heads, width, 1) @ normal(heads, 1, d_v)
    extra: dict[str, Tensor] = {}
    if biased:
        extra = {"b_q": normal(heads, d) * power(-1, 1.5), "b_k": normal(heads, d) * power(-1, 1.5), "b_v": normal(heads, d_v) * power(-1, 2)}
    if mask in ("causal", "padded"):
        extra["mask"] = causal(n)
    if mask == "window":
        extra["mask"] = window(n)
    if mask == "offsets":
        extra["mask"] = normal(1, heads, n, n)
    if mask == "padded":
        extra["valid"] = torch.arange(n).expand(samples, n) < torch.tensor([[n], [max(1, n - 1)], [1]])
    return Attention(*(t.to(dtype) for t in (x, w_q, w_k, w_v)), **{k: t if t.dtype == torch.bool else t.to(dtype) for k, t in extra.items()})
