"""What the tensors of an attention layer must be."""

import math
from typing import TYPE_CHECKING

import torch

from lipbound.errors import AttentionError

if TYPE_CHECKING:
    from lipbound.attention.layer import Attention

BLOCKED = -1e30
"""Additive mask entries at or below this value forbid attention (models write the dtype's lowest number, or -inf)."""


TENSORS = ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "mask", "sinks")
"""The floating tensors of a layer."""


def validate(att: "Attention") -> None:
    """Raise AttentionError unless the tensors of a layer fit together, are numbers of one dtype, and every query may attend to some key."""
    shapes = {name: tuple(getattr(att, name).shape) for name in ("x", "w_q", "w_k", "w_v")}
    for name, shape in shapes.items():
        axes = "(samples, N, D)" if name == "x" else "(heads, D, d)"
        if len(shape) != 3 or 0 in shape:
            raise AttentionError(f"{name} has shape {shape}; it must be {axes} with no empty axis")
    heads, _, d = shapes["w_q"]
    samples, tokens, model = shapes["x"]
    d_v = shapes["w_v"][2]
    expected: dict[str, tuple[int | None, ...]] = {
        "w_q": (heads, model, d), "w_k": (heads, model, d), "w_v": (heads, model, d_v),
        "b_q": (heads, d), "b_k": (heads, d), "b_v": (heads, d_v), "w_o": (heads, d_v, None), "valid": (samples, tokens), "sinks": (heads,),
    }  # fmt: skip
    for name, shape in expected.items():
        tensor = getattr(att, name)
        if tensor is None:
            continue
        got = tuple(tensor.shape)
        if len(got) != len(shape) or any(b is not None and a != b for a, b in zip(got, shape, strict=True)):
            wanted = tuple("any" if s is None else s for s in shape)
            raise AttentionError(f"{name} has shape {got}; with x {shapes['x']} and w_q {shapes['w_q']} it must be {wanted}")
    _check_values(att)
    if att.rotation is not None and (att.rotation.tokens != tokens or att.rotation.width > d):
        raise AttentionError(
            f"rotation is of {att.rotation.tokens} tokens and turns {att.rotation.width} coordinates; with x {shapes['x']} and w_q "
            f"{shapes['w_q']} it must be of {tokens} tokens and turn at most {d}"
        )
    for name, norm in (("norm_q", att.norm_q), ("norm_k", att.norm_k)):
        if norm is not None and norm.gain.shape != (heads, d):
            raise AttentionError(f"{name} has gains of shape {tuple(norm.gain.shape)}; with w_q {shapes['w_q']} it must be {(heads, d)}")
        if norm is not None and norm.over is not None and norm.over[0].shape[0] != model:
            raise AttentionError(f"{name} normalises a projection of shape {tuple(norm.over[0].shape)}; with x {shapes['x']} it must be ({model}, n)")
    if att.cap is not None and not 0 < att.cap < math.inf:
        raise AttentionError(f"cap is {att.cap}; it must be a positive number")
    if att.mask is not None:
        try:
            full = torch.broadcast_shapes(att.mask.shape, (samples, heads, tokens, tokens))
        except RuntimeError:
            full = None
        if full != (samples, heads, tokens, tokens):
            raise AttentionError(
                f"mask has shape {tuple(att.mask.shape)}; it must be broadcastable to (samples, heads, N, N) = {(samples, heads, tokens, tokens)}"
            )
    _check_reachable(att)


def _check_values(att: "Attention") -> None:
    if att.valid is not None and att.valid.dtype != torch.bool:
        raise AttentionError(f"valid has dtype {att.valid.dtype}; it must be torch.bool")
    for name in TENSORS:
        tensor = getattr(att, name)
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, torch.float64):
            raise AttentionError(f"{name} has dtype {tensor.dtype}; attention is computed in torch.float32 or torch.float64")
        if tensor.dtype != att.x.dtype:
            raise AttentionError(f"{name} has dtype {tensor.dtype} but x has {att.x.dtype}; give all tensors one dtype")
        if name == "mask":
            if bool(torch.isnan(tensor).any()) or bool((tensor == math.inf).any()):
                raise AttentionError("mask has NaN or +inf entries; it must be finite, or -inf where attention is forbidden")
            continue
        counted = tensor[att.valid] if name == "x" and att.valid is not None else tensor
        if not bool(torch.isfinite(counted).all()):
            raise AttentionError(f"{name} has NaN or infinite entries; the Jacobian is not defined there")


def _check_reachable(att: "Attention") -> None:
    """Every query that counts must see at least one key."""
    if att.valid is not None and not bool(att.valid.any(-1).all()):
        raise AttentionError("valid marks every token of a sample as padding; each sample needs at least one token")
    if att.mask is None:
        return
    tokens = att.x.shape[1]
    keys = (att.mask > BLOCKED).expand(*att.mask.shape[:-2], *torch.broadcast_shapes(att.mask.shape[-2:], (1, tokens)))
    if att.valid is not None:
        keys = keys & att.valid[:, None, None, :]
    sees = keys.any(-1)
    if att.valid is not None:
        sees = sees | ~att.valid[:, None, :]
    if not bool(sees.all()):
        raise AttentionError("mask forbids some query every key, so its softmax is undefined; mark such tokens with valid=False")
