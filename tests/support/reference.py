"""Attention heads as plain functions, from the definition alone, to test closed forms against."""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.qk_norm import QKNorm


def head_function(att: Attention, sample: int, head: int) -> Callable[..., Tensor]:
    """Return the head as a plain function of its input, (n, D) -> (n, d_v).

    n counts the tokens of the sample that are not padding; of the memory of cross-attention there
    are as many outputs as queries. Queries, keys or values as they enter may be given by name, as
    in ``f(x, k=keys)``, in place of those made of the input. Written independently of the closed
    forms, from the definition; with ``torch.func.jacrev`` it is the oracle they are tested against.
    """

    counts = (att.valid, att.tokens), (att.valid_rows, att.rows), (att.valid_keys, att.keys)
    keep, rows, keys = (
        torch.ones(count, dtype=torch.bool, device=att.device) if valid is None else valid[sample]
        for valid, count in counts
    )
    held = {side: getattr(att.other_stream, side, None) for side in "qkv"}
    fixed = {
        side: t[head, sample][rows if side == "q" else keys]
        for side, t in held.items()
        if t is not None
    }
    mask, angles = None, None
    sink = None if att.sinks is None else att.sinks[head].to(att.dtype).expand(int(rows.sum()), 1)
    if att.rotation is not None:
        angles = torch.complex(att.rotation.cos.to(att.dtype), att.rotation.sin.to(att.dtype))[keep]
    gate, late = att.gate, att.norm_late
    after = None if att.norm_v is None else att.norm_v.after
    if att.mask is not None:
        full = att.mask.expand(att.samples, att.heads, att.rows, att.keys)[sample, head]
        mask = full[rows][:, keys]

    def projected(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return x @ w[head] if b is None else x @ w[head] + b[head]

    def rotated(y: Tensor) -> Tensor:
        if angles is None:
            return y
        r = angles.shape[1]
        turned = torch.complex(y[:, :r], y[:, r : 2 * r]) * angles
        return torch.cat([turned.real, turned.imag, y[:, 2 * r :]], -1)

    def f(x: Tensor, **given: Tensor) -> Tensor:
        q, k = projected(x, att.w_q, att.b_q), projected(x, att.w_k, att.b_k)
        if late:
            q, k = rotated(q), rotated(k)
        q, k = _normed(x, q, att.norm_q, head), _normed(x, k, att.norm_k, head)
        if not late:
            q, k = rotated(q), rotated(k)
        given = fixed | given
        q, k = given.get("q", q), given.get("k", k)
        scores = att.scale * (q @ k.mT)
        if att.cap is not None:
            scores = torch.tanh(scores / att.cap) * att.cap
        scores = scores if mask is None else scores + mask
        p = torch.softmax(scores if sink is None else torch.cat([sink, scores], -1), -1)
        v = _normed(x, projected(x, att.w_v, att.b_v), att.norm_v, head)
        v = v if after is None else v @ after[head]
        out = (p if sink is None else p[:, 1:]) @ given.get("v", v)
        if gate is not None:
            out = torch.sigmoid(projected(x, gate.w, gate.b)) * out
            out = out if gate.after is None else out @ gate.after[head]
        return out

    return f


def _normed(x: Tensor, y: Tensor, norm: QKNorm | None, head: int) -> Tensor:
    if norm is None:
        return y
    linear = torch.nn.functional.linear
    whole = y if norm.over is None else linear(x, norm.over[0].mT, norm.over[1])
    size = torch.rsqrt((whole**2).mean(-1, keepdim=True) + norm.eps)
    size = size if norm.part is None else torch.where(norm.part, size, 1.0)
    y = norm.gain[head] * y * size
    return y if norm.bias is None else y + norm.bias[head]


def dense_jacobian(att: Attention, sample: int = 0, head: int = 0) -> Tensor:
    """Return the Jacobian of one head by reverse-mode autograd, (n d_v, n D): the oracle.

    Padding tokens are left out. Memory grows like n^2 d_v D: for small cases.
    """
    x = att.x[sample] if att.valid is None else att.x[sample][att.valid[sample]]
    jacobian = torch.func.jacrev(head_function(att, sample, head))(x)
    n, d_v = jacobian.shape[:2]
    return jacobian.reshape(n * d_v, -1)
