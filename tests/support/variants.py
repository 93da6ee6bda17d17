"""Small random layers with whatever may stand between projections and softmax."""

import torch
from support.layers import causal, normal, window

from lipbound.attention.layer import Attention
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation

LINEAR = ("rotation", "norm", "together", "cap", "sinks")
"""Those that leave values alone."""
VARIANTS = (*LINEAR, "values", "latent", "gate")
MASKS = ("none", "causal", "window", "padded", "offsets")
SETS = ("", "rotation", "norm", "together rotation", "cap", "sinks", "rotation cap sinks")
HAS = tuple(tuple(names.split()) for names in SETS)
"""Sets of variants for bounds: none of them, each of those that leave values alone, and several."""


def layer(
    seed: int,
    has: frozenset[str] | str,
    *,
    mask: str = "none",
    n: int = 5,
    d: int = 4,
    d_v: int = 3,
    scale: float = 1.0,
    biases: bool = True,
    same: bool = False,
    turned: int | None = None,
    samples: int = 2,
    heads: int = 3,
) -> Attention:
    """Samples x heads of width 7; ``same``: all tokens of a sample are equal; ``turned``: how many
    pairs of coordinates a rotation turns at most; ``padded``: every second sample is shorter by
    two."""
    has = frozenset(has.split()) if isinstance(has, str) else has
    draw = normal(seed)
    x = scale * draw(samples, n, 7)
    if same:
        x[:, 1:] = x[:, :1]
    w_q, w_k, w_v = draw(heads, 7, d), draw(heads, 7, d), draw(heads, 7, d_v)
    shifts = ((1, d), (3, d), (5, d_v))
    b_q, b_k, b_v = (size * draw(heads, k) if biases else None for size, k in shifts)
    extra: dict = {}
    if "rotation" in has:
        pairs = d // 2 - seed % 2 if turned is None else min(turned, d // 2)
        turn = Rotation.of_angles(3 * draw(n, max(1, pairs)))
        factor = 1.3 if seed % 3 == 0 else 1.0
        extra["rotation"] = Rotation(factor * turn.cos, factor * turn.sin)
    if has & {"norm", "together"}:
        for side, w, b in (("norm_q", w_q, b_q), ("norm_k", w_k, b_k)):
            whole = w.transpose(0, 1).flatten(1), None if b is None else b.flatten()
            gain, shift = 1 + draw(heads, d), draw(heads, d) if seed % 2 else None
            extra[side] = QKNorm(gain, shift, 1e-6, whole if "together" in has else None)
        if seed % 5 == 0:
            extra.pop("norm_k")
    if "values" in has:
        extra["norm_v"] = QKNorm(1 + draw(heads, d_v), draw(heads, d_v) if seed % 2 else None, 1e-6)
    if "latent" in has:  # keys in part, and values, of a normalised latent vector
        latent = draw(7, 4), draw(4) if biases else None
        part = torch.arange(d) < max(1, d - 2)
        gain = torch.where(part, 1 + draw(heads, d), 1.0)
        extra["norm_k"] = QKNorm(gain, None, 1e-6, latent, part)
        w_v = latent[0] @ draw(heads, 4, d_v)
        shift = draw(heads, d_v) if seed % 2 else None
        extra["norm_v"] = QKNorm(1 + draw(heads, d_v), shift, 1e-6, latent)
    if "gate" in has:
        b_gate = draw(heads, d_v) if biases else None
        extra["gate"] = Gate(draw(heads, 7, d_v), b_gate)
    if "cap" in has:
        extra["cap"] = 1.5
    if "sinks" in has:
        extra["sinks"] = 2 * draw(heads)
    if mask == "causal":
        extra["mask"] = causal(n)
    if mask == "window":
        extra["mask"] = window(n)
    if mask == "offsets":
        extra["mask"] = draw(heads, n, n)
    if mask == "padded":
        lengths = torch.tensor([n, max(1, n - 2)] * samples)[:samples, None]
        extra["valid"] = torch.arange(n) < lengths
    return Attention(x, w_q, w_k, w_v, b_q=b_q, b_k=b_k, b_v=b_v, w_o=draw(heads, d_v, 7), **extra)


def cross(
    seed: int,
    stream: str,
    *,
    has: frozenset[str] = frozenset(),
    padded: bool = False,
    rows: int = 4,
    keys: int = 6,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """Cross-attention of 2 samples x 3 heads, of which a stream, "queries" or "memory", moves."""
    draw = normal(seed, dtype)
    moves = stream == "memory"
    n, others = (keys, rows) if moves else (rows, keys)
    x, w_q, w_k, w_v = draw(2, n, 7), draw(3, 7, 4), draw(3, 7, 4), draw(3, 7, 3)
    extra: dict = {"b_q": draw(3, 4), "b_k": 3 * draw(3, 4), "b_v": 5 * draw(3, 3)}
    given = {"q": draw(3, 2, others, 4)} if moves else {
        "k": draw(3, 2, others, 4) + 2, "v": draw(3, 2, others, 3) + 3
    }  # fmt: skip
    side = "norm_k" if moves else "norm_q"
    if "norm" in has:
        extra[side] = QKNorm(1 + draw(3, 4), None, 1e-6)
    if "values" in has and moves:
        extra["norm_v"] = QKNorm(1 + draw(3, 3), None, 1e-6)
    if "cap" in has:
        extra["cap"] = 1.5
    if "sinks" in has:
        extra["sinks"] = draw(3)
    if "offsets" in has:
        extra["mask"] = draw(3, rows, keys)
    marks = [torch.arange(m) < torch.tensor([[m], [m - 2]]) for m in (n, others)]
    other = OtherStream(**given, valid=marks[1] if padded else None)
    if padded:
        extra["valid"] = marks[0]
    return Attention(x, w_q, w_k, w_v, w_o=draw(3, 3, 5), other_stream=other, **extra)
