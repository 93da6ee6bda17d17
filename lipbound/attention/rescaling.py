"""Sizes of a layer's numbers: for which norms are computed, and values in units of theirs."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.validation import largest_entries, sizes

ORDINARY = 16
"""Logarithms to base 2 of ordinary sizes of tensors: products of many are in range."""
FIXED = {"qk_norm", "cross"}
"""Variants under which sizes of queries and keys do not go together."""


def unit_values(att: Attention, *, together: bool = False) -> tuple[Attention, Tensor]:
    """Return the layer with each head's values divided by a power of two near their size.

    Exact, and keeps products away from overflow and underflow; J is linear in the values: Lemma 4
    (docs/theory/jacobian.md).

    Args:
        att: the layer.
        together: whether all heads are divided by the same number.

    Returns:
        The layer with these values, and the exponents of the powers of two, (heads,) on the CPU.
    """
    linear: tuple[str, ...] = ("w_v", "b_v")  # the tensors that values, and J, are linear in
    if att.fixed("v") is not None:
        linear = ("other_stream.v",)
    elif att.norm_v is not None:
        own = att.norm_v.after is None
        linear = ("norm_v.gain", "norm_v.bias") if own else ("norm_v.after",)
    size = torch.tensor(largest_entries(att)[linear[0]], dtype=torch.float64)
    given = {name: t for name, t in att.tensors().items() if name in linear}
    if together:
        size = size.amax().expand(len(size))
    exponents = torch.where(size > 0, size, 1.0).clamp_min(1e-300).log2().round()
    there = (2.0**exponents).to(att.device)
    parts: dict[str, Any] = {}
    for name, t in given.items():
        part, _, field = name.partition(".")
        scaled = (t.double() / there.view(-1, *[1] * (t.ndim - 1))).to(t.dtype)
        whole = parts.get(part, getattr(att, part))
        parts[part] = replace(whole, **{field: scaled}) if field else scaled
    other = att.over_values(parts, look_at=linear[1:])
    other.cache.keep("centred_v", att.centred_v / there[:, None, None])
    return other, exponents.long()


def of_ordinary_size(att: Attention, *, together: bool = False) -> tuple[Attention, Tensor]:
    r"""Return the layer in float64 with tensors of ordinary size, and what J is multiplied with.

    :math:`(x, W_Q, W_K)` and :math:`(2^a x, 2^{b-a} W_Q, 2^{-b-a} W_K)` have one J, which is linear
    in the values: Lemma 73 (docs/theory/upper_values.md). Layers of ordinary size stay as they are.

    Args:
        att: the layer, of sizes as of `lipbound.attention.validation.check_sizes`.
        together: whether J of all heads is multiplied with the same number.

    Returns:
        The layer, and exponents of the powers of two that its J is to be multiplied with, (heads,)
        on the CPU.
    """
    att, invariant = att.double(), not FIXED & att.variants
    names = {"x", "scale", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v"} & {*sizes(att)}
    blind = att.plain("k") and att.shift_invariant  # J does not see the bias of keys
    names -= {"b_k"} if blind else set()
    logs = {name: [math.frexp(t)[1] for t in sizes(att)[name]] for name in names}
    if all(abs(one) <= ORDINARY for several in logs.values() for one in several):
        return att, torch.zeros(att.heads, dtype=torch.long)
    e = {name: torch.tensor(several, device=att.device) for name, several in logs.items()}
    e_x, e_c = logs["x"][0], logs["scale"][0] * invariant
    q, k = (torch.maximum(e["w_" + t] + e_x, e.get("b_" + t, e["w_" + t])) for t in "qk")
    turn = (k + e_c - q) // 2 * invariant  # as queries and keys are multiplied
    by = {"w_q": e_x + turn, "b_q": turn, "w_k": e_x + e_c - turn, "b_k": e_c - turn}
    by["w_v"] = torch.full_like(turn, e_x)
    parts: dict[str, Any] = {name: _times(getattr(att, name), by[name]) for name in by if name in e}
    parts |= {"x": _times(att.x, -e["x"]), "scale": math.ldexp(att.scale, -e_c)}
    parts |= {"b_k": None} if blind else {}
    # other maps of what is multiplied make up for it: two factors, each in range
    first, second = 2.0 ** (e_x // 2), 2.0 ** ((e_x + 1) // 2)
    for name in ("norm_q", "norm_k", "norm_v"):
        norm = getattr(att, name)
        if norm is not None and norm.over is not None:
            parts[name] = replace(norm, over=(norm.over[0] * first * second, norm.over[1]))
    if att.gate is not None:
        parts["gate"] = replace(att.gate, w=att.gate.w * first * second)
    other, exponents = unit_values(att.with_parts(**parts, check=False), together=together)
    return other, exponents - e_x


def _times(t: Tensor, exponents: Tensor) -> Tensor:
    """Return t (n, ...), float64, times 2 to the exponents (n,), which are below 1,000."""
    power = ((exponents + 1023) << 52).view(torch.float64)
    return t * power.view(-1, *[1] * (t.ndim - 1))
