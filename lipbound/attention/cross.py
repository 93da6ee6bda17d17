"""Layers of cross-attention from their tensors."""

from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.projections import Projections, projected
from lipbound.attention.scoring import Scoring
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.errors import AttentionError, choice
from lipbound.schema import MEMORY, QUERIES


def cross_attention(
    x: Tensor,
    memory: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    stream: str,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    w_o: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    valid_memory: Tensor | None = None,
) -> Attention:
    r"""Return cross-attention as a function of one of its two streams of tokens.

    Queries are ``x @ w_q + b_q``, keys and values ``memory @ w_k + b_k`` and ``memory @ w_v +
    b_v``. The other stream is held: Lemma 17 (docs/theory/bounds.md).

    Args:
        x: tokens that queries are made of, (samples, N, D_x).
        memory: tokens that keys and values are made of, (samples, M, D_y).
        w_q: (heads, D_x, d).
        w_k: (heads, D_y, d).
        w_v: (heads, D_y, d_v).
        stream: which tokens move, "queries" or "memory"; the others are held.
        b_q, b_k, b_v: biases, (heads, d), (heads, d), (heads, d_v), or None.
        w_o: each head's slice of the output projection, (heads, d_v, D_out), or None.
        scale: factor of the scores; ``d ** -0.5`` when None.
        mask: additive, broadcastable to (samples, heads, N, M), as of `Attention`.
        valid: which tokens of x are not padding, (samples, N) bool, or None.
        valid_memory: the same of the memory, (samples, M) bool, or None.

    Returns:
        A layer whose inputs are that stream, in its dtype, float32 or float64.

    Raises:
        LipboundError: an unknown stream.
        AttentionError: tensors that do not fit, as of `Attention`.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 3, 8), (1, 5, 6), (2, 8, 4), (2, 6, 4), (2, 6, 4)]
    >>> layer = cross_attention(*(torch.randn(s, generator=g) for s in shapes), stream="memory")
    >>> layer.p.shape, layer.perturbed
    (torch.Size([1, 2, 3, 5]), 'memory')
    """
    choice("stream", stream, (QUERIES, MEMORY))
    for name, t, axes in (("x", x, 3), ("memory", memory, 3), ("w_q", w_q, 3), ("w_k", w_k, 3)):
        if not isinstance(t, Tensor) or t.ndim != axes:
            raise AttentionError(f"{name} must be a tensor with {axes} axes")
    if w_q.shape[1] != x.shape[2] or w_k.shape[1] != memory.shape[2]:
        raise AttentionError(
            f"w_q {tuple(w_q.shape)} and w_k {tuple(w_k.shape)} do not fit x {tuple(x.shape)} and "
            f"memory {tuple(memory.shape)}; they must be (heads, D_x, d) and (heads, D_y, d)"
        )

    def made(tokens: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return projected(tokens, w, b).to(tokens.dtype).transpose(0, 1)

    if stream == MEMORY:
        other = OtherStream(q=made(x, w_q, b_q), valid=valid)
        own = Projections(w_k.new_zeros(w_k.shape), w_k, w_v, None, b_k, b_v, w_o)
        return Attention.of(memory, own, Scoring(scale, mask, (other,)), valid=valid_memory)
    other = OtherStream(k=made(memory, w_k, b_k), v=made(memory, w_v, b_v), valid=valid_memory)
    no_k, no_v = w_q.new_zeros(w_q.shape), w_q.new_zeros(*w_q.shape[:2], w_v.shape[2])
    own = Projections(w_q, no_k, no_v, b_q, None, None, w_o)
    return Attention.of(x, own, Scoring(scale, mask, (other,)), valid=valid)
