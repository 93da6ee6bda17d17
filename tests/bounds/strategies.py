"""Random, degenerate and adversarial small layers for property tests, and the oracles of both maps."""

import math

import torch
from conftest import causal, window
from hypothesis import strategies as st
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


def dense_norms(att: Attention, map: str = "head") -> Tensor:
    """Exact norms by autograd Jacobians of the definition and float64 SVD, all samples and heads at once, (samples, heads)."""
    att = att.double()
    n, heads, samples = att.tokens, att.heads, att.samples
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64) if att.mask is None else att.mask
    mask = mask.expand(samples, heads, n, n).clone()
    real = torch.ones(samples, n, dtype=torch.bool) if att.valid is None else att.valid
    mask = mask.masked_fill(~real[:, None, None], -math.inf).masked_fill(~real[:, None, :, None], 0.0)
    b_q, b_k, b_v = (
        torch.zeros(heads, w.shape[2]).double() if b is None else b for b, w in ((att.b_q, att.w_q), (att.b_k, att.w_k), (att.b_v, att.w_v))
    )

    def head(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, b_q: Tensor, b_k: Tensor, b_v: Tensor, m: Tensor, rows: Tensor) -> Tensor:
        if map == "head":
            return rows[:, None] * (torch.softmax(att.scale * (x @ w_q + b_q) @ (x @ w_k + b_k).mT + m, -1) @ (x @ w_v + b_v))
        q = x @ w_q
        distances = ((q[:, None] - q[None]) ** 2).sum(-1)
        return rows[:, None] * (torch.softmax(-att.scale * distances + m, -1) @ (x @ (att.scale * w_q @ w_q.mT @ w_v)))

    over_heads = torch.func.vmap(torch.func.jacrev(head), in_dims=(None, 0, 0, 0, 0, 0, 0, 0, None))
    jacobians = torch.func.vmap(over_heads, in_dims=(0, None, None, None, None, None, None, 0, 0))(
        att.x, att.w_q, att.w_k, att.w_v, b_q, b_k, b_v, mask, real.double()
    )
    return torch.linalg.svdvals(jacobians.reshape(samples, heads, n * att.d_v, -1))[..., 0]
