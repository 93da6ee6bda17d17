"""Sizes of a layer's numbers: for which norms are computed, and values in units of theirs."""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import PATTERN, Attention
from lipbound.errors import LipboundError

LARGEST = 1e60
"""Largest entries of tensors from which norms are computed, and its inverse the smallest: products
of four of them, and squares of norms, are in the range of float64. All float32 numbers are."""
ORDINARY = 16
"""Logarithms to base 2 of ordinary sizes of tensors: products of many are in range."""
FIXED = {"qk_norm", "cross"}
"""Variants under which sizes of queries and keys do not go together."""


@memoised
def sizes(att: Attention) -> dict[str, list[float]]:
    """Return largest entries of a layer's tensors by name: those of weights head by head."""
    given = {"x": att.x[None], **att.projections.tensors()}
    for step in att.scoring.steps:
        own = [t for t in step.inputs() if t.is_floating_point() and t.numel()]
        given |= {f"{step.title} ({i})": t.reshape(1, -1) for i, t in enumerate(own)}
    largest = [t.detach().flatten(1).abs().amax(1).to(att.dtype) for t in given.values()]
    values = torch.cat(largest).tolist()
    ends = itertools.accumulate(map(len, largest))
    parts = zip(given, largest, ends, strict=True)
    found = {name: values[end - len(t) : end] for name, t, end in parts}
    return found | {"scale": [abs(att.scale)]}


def check_sizes(att: Attention) -> None:
    """Check that products and squares of a layer's numbers stay in the range of float64.

    Raises:
        LipboundError: a tensor whose largest entry is neither zero nor from 1e-60 to 1e60; of
            weights that of a head.
    """
    for name, values in sizes(att).items():
        for size in values:
            if size and not 1 / LARGEST <= size <= LARGEST:
                raise LipboundError(
                    f"the largest entry of {name} is {size:.3g}; norms and bounds are computed "
                    f"where it is 0 or from {1 / LARGEST:g} to {LARGEST:g}: multiply x by a power "
                    "of two and the weights by its inverse"
                )


def unit_values(att: Attention, *, together: bool = False) -> tuple[Attention, Tensor]:
    """Return the layer with each head's values divided by a power of two near their size.

    Exact, and keeps products away from overflow and underflow; J is linear in the values: Lemma 4
    (docs/theory/jacobian.md).

    Args:
        att: the layer.
        together: whether all heads are divided by the same number.

    Returns:
        The layer with these values, and the powers of two, (heads,) float64.
    """
    given = _linear(att)
    first = next(iter(given.values()))
    size = first.detach().abs().flatten(1).amax(-1).double()
    if together:
        size = size.amax().expand(len(size))
    unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
    tensors = {
        name: (t.double() / unit.view(-1, *[1] * (t.ndim - 1))).to(t.dtype)
        for name, t in given.items()
    }
    finite = all(bool(torch.isfinite(t).all()) for t in list(tensors.values())[1:])
    other = _with_linear(att, tensors, check=not finite)
    other.cache.share(att.cache, *PATTERN)
    other.cache.keep("centred_v", att.centred_v / unit[:, None, None])
    return other, unit


def _linear(att: Attention) -> dict[str, Tensor]:
    """Return the tensors that values, and J, are linear in, (heads, ...) each, by name."""
    if (step := att.scoring.values_step) is not None:
        return step.linear()
    found = {"w_v": att.w_v, "b_v": att.b_v}
    return {name: t for name, t in found.items() if t is not None}


def _with_linear(att: Attention, tensors: dict[str, Tensor], *, check: bool) -> Attention:
    """Return the layer with other tensors of `_linear`."""
    if (step := att.scoring.values_step) is not None:
        scoring = att.scoring.replaced(step.with_linear(tensors))
        return att.with_parts(scoring=scoring, check=check)
    return att.with_parts(projections=replace(att.projections, **tensors), check=check)


def ordinary(att: Attention, *, together: bool = False) -> tuple[Attention, Tensor]:
    r"""Return the layer in float64 with tensors of ordinary size, and what J is multiplied with.

    :math:`(x, W_Q, W_K)` and :math:`(2^a x, 2^{b-a} W_Q, 2^{-b-a} W_K)` have one J, which is linear
    in the values: Lemma 73 (docs/theory/upper_values.md). Layers of ordinary size stay as they are.

    Args:
        att: the layer, of sizes as of `check_sizes`.
        together: whether J of all heads is multiplied with the same number.

    Returns:
        The layer, and exponents of the powers of two that its J is to be multiplied with, (heads,).
    """
    att, own, invariant = att.double(), att.projections, not FIXED & att.scoring.names
    if att.scoring.plain("k") and att.scoring.shift_invariant:
        own = replace(own, b_k=None)  # J does not see it
    names = {"x", "scale", *own.tensors()} - {"w_o"}
    logs = {name: [math.frexp(t)[1] for t in sizes(att)[name]] for name in names}
    if all(abs(one) <= ORDINARY for several in logs.values() for one in several):
        return att, torch.zeros(att.heads, dtype=torch.long, device=att.device)
    e = {name: torch.tensor(several, device=att.device) for name, several in logs.items()}
    e_x, e_c = e["x"], e["scale"] * invariant
    q, k = (torch.maximum(e["w_" + t] + e_x, e.get("b_" + t, e["w_" + t])) for t in "qk")
    turn = (k + e_c - q) // 2 * invariant  # as queries and keys are multiplied
    by = {"w_q": e_x + turn, "b_q": turn, "w_k": e_x + e_c - turn, "b_k": e_c - turn}
    by["w_v"] = e_x.expand(att.heads)
    tensors = {name: _times(t, by[name]) for name, t in own.tensors().items() if name in by}
    steps = tuple(step.of_scaled_inputs(-int(e_x)) for step in att.scoring.steps)
    scoring = replace(att.scoring, scale=math.ldexp(att.scale, -int(e_c)), steps=steps)
    x, own = _times(att.x[None], -e_x)[0], replace(own, **tensors)
    other = att.with_parts(x=x, projections=own, scoring=scoring, check=False)
    other, unit = unit_values(other, together=together)
    return other, unit.log2().round().long() - e_x


def _times(t: Tensor, exponents: Tensor) -> Tensor:
    """Return t (n, ...), float64, times 2 to the exponents (n,), which are below 1,000."""
    power = ((exponents + 1023) << 52).view(torch.float64)
    return t * power.view(-1, *[1] * (t.ndim - 1))
