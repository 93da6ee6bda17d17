"""Sizes of a layer's numbers: for which norms are computed, and values in units of theirs."""

from dataclasses import replace

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import PATTERN, Attention
from lipbound.errors import LipboundError

LARGEST = 1e60
"""Largest entries of tensors from which norms are computed, and its inverse the smallest: products
of four of them, and squares of norms, are in the range of float64. All float32 numbers are."""


@memoised
def check_sizes(att: Attention) -> bool:
    """Check that products and squares of a layer's numbers stay in the range of float64.

    Args:
        att: the layer. Weights count head by head.

    Returns:
        True.

    Raises:
        LipboundError: a tensor whose largest entry is neither zero nor from 1e-60 to 1e60.
    """
    if att.dtype != torch.float64:
        return True
    given = {"x": att.x[None], "scale": att.x.new_tensor([[abs(att.scale)]])}
    given |= att.projections.tensors()
    for step in att.scoring.steps:
        own = [t for t in step.inputs() if t.is_floating_point()]
        given |= {f"{step.title} ({i})": t.reshape(1, -1) for i, t in enumerate(own)}
    sizes = torch.cat([t.detach().flatten(1).abs().amax(1) for t in given.values() if t.numel()])
    if not bool(((sizes > LARGEST) | (sizes < 1 / LARGEST) & (sizes > 0)).any()):
        return True
    for name, t in given.items():
        for size in t.detach().flatten(1).abs().amax(1).tolist():
            if size and not 1 / LARGEST <= size <= LARGEST:
                raise LipboundError(
                    f"the largest entry of {name} is {size:.3g}; norms and bounds are computed "
                    f"where it is 0 or from {1 / LARGEST:g} to {LARGEST:g}: multiply x by a power "
                    "of two and the weights by its inverse"
                )
    return True


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
