"""Layers brought into the range of float64 by powers of two, which their Jacobians know exactly."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.layer import PATTERN, WIDE, Attention, in_float64
from lipbound.attention.projections import Projections
from lipbound.attention.variants.base import Side
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.value_norm import ValueNorm

ORDINARY = 16
"""Logarithms to base 2 within which sizes of tensors are left as they are by `unit_scales`."""
LARGEST_SCORES = 80
"""Logarithm to base 2 of the size of scores beyond which no bound is evaluated."""
FIXED = {"qk_norm", "cross"}
"""Variants under which sizes of queries and keys do not go together."""
ZERO = -100_000
"""Stands for the logarithm of zero."""


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


class UnitScales(NamedTuple):
    """A layer with tensors of ordinary size.

    Attributes:
        attention: the layer.
        exponents: of the powers of two that its J is to be multiplied with, (heads,).
        exact: whether all this is exact and logits are in the range in which bounds can be
            evaluated, (samples, heads) bool.
        of_sides: the same as ``exponents`` for the derivatives by queries and keys alone.
    """

    attention: Attention
    exponents: Tensor
    exact: Tensor
    of_sides: dict[Side, Tensor]


def unit_scales(att: Attention) -> UnitScales:
    r"""Return the layer in float64 with tensors of ordinary size, by powers of two.

    :math:`(x, W_Q, W_K)` and :math:`(2^a x, 2^{b-a} W_Q, 2^{-b-a} W_K)`, with biases of queries and
    keys times :math:`2^{\pm b}`, have one J, which is linear in the values: Lemma 73
    (docs/theory/upper_values.md). Biases that J does not see are dropped. Layers whose sizes lie
    within :math:`2^{\pm 16}` stay as they are, and share what is derived from them. Queries, keys
    and values that are normalised keep their size before that.
    """
    exact = torch.ones(att.samples, att.heads, dtype=torch.bool, device=att.device)
    same = ordinary(att)
    if same is not None:
        none = torch.zeros(att.heads, dtype=torch.long, device=att.device)
        return UnitScales(same, none, exact, {"q": none, "k": none})
    wide, invariant = att.double(), not FIXED & att.scoring.names
    own, sizes, e_x, e_c = _sizes(wide)
    e_x = 0 if e_x == ZERO else e_x
    shifts, logits = _shifts(sizes, e_x, e_c, invariant)
    moved: dict[Side, Tensor] = {"q": shifts["b_q"], "k": shifts["b_k"]}
    exponents, step = -shifts["w_v"], wide.scoring.values_step
    tensors = own.tensors()
    if step is not None:
        e_v = next(sizes[name] for name in step.linear())
        if isinstance(step, ValueNorm) and step.norm.over is not None:
            e_v = e_v + sizes["w_v"] - sizes["over"]
        e_v = torch.where(e_v.abs() >= -ZERO // 2, 0, e_v)
        shifts |= {"w_v": torch.full_like(e_v, e_x), "b_v": torch.zeros_like(e_v)}
        shifts |= dict.fromkeys(step.linear(), -e_v)
        exponents, tensors = e_v - e_x, tensors | step.linear()
    tensors = {name: t for name, t in tensors.items() if name in shifts}
    scaled = {name: _times(t, shifts[name]) for name, t in tensors.items()}
    for name, t in scaled.items():
        exact &= (_times(t, -shifts[name]) == tensors[name]).flatten(1).all(1)
    by_x = torch.full((att.samples,), -e_x, device=att.device)
    x, before = _times(wide.x, by_x), wide.scoring.steps
    steps = tuple(one.of_scaled_inputs(-e_x) for one in before)
    exact &= (_times(x, -by_x) == wide.x).all() & (logits <= LARGEST_SCORES)
    for old, new in zip(before, steps, strict=True):
        back = new.of_scaled_inputs(e_x).inputs()
        exact &= all(torch.equal(t, u) for t, u in zip(old.inputs(), back, strict=True))
    # nothing is said of other heads, whose numbers may be too large to compute with
    known = {name: exact.all(0).view(-1, *[1] * (t.ndim - 1)) for name, t in scaled.items()}
    scaled = {name: t.where(known[name], torch.zeros_like(t)) for name, t in scaled.items()}
    scale = math.ldexp(att.scale, -e_c) if invariant else att.scale
    scoring = replace(wide.scoring, scale=scale, steps=steps)
    if (step := scoring.values_step) is not None:
        linear = {name: scaled.pop(name) for name in step.linear()}
        scoring = scoring.replaced(step.with_linear(linear))
    other = wide.with_parts(
        x=x, projections=replace(own, **scaled), scoring=scoring, surroundings=None
    )
    # outputs are those of values in their own units, which queries and keys are not
    of_sides = {side: exponents + e_x + shift for side, shift in moved.items()}
    return UnitScales(other, exponents, exact, of_sides)


def on_one_scale(
    att: Attention, exponents: Tensor, *, projected: bool, fixed: bool
) -> tuple[Attention, Tensor, Tensor]:
    """Return heads whose J are to be multiplied with powers of two as a layer with one for all.

    Args:
        att: the layer.
        exponents: of these powers, (heads,).
        projected: whether heads are projected by ``w_o`` and added; else they are side by side.
        fixed: whether that one power must be 2^0.

    Returns:
        That layer; its exponent, (heads,) alike; and whether all this is exact, () bool.
    """
    given = _linear(att)
    if projected and att.w_o is not None:
        given = {"w_o": att.w_o}
    sizes = torch.stack([_exponents(t) + exponents for t in given.values()])
    top = sizes.amax().clamp_min(ZERO // 2) * (not fixed)
    by = exponents - torch.where(top > ZERO // 2, top, 0)
    moved = {name: _times(t, by) for name, t in given.items()}
    exact = torch.stack([(_times(t, -by) == given[name]).all() for name, t in moved.items()])
    moved = {name: t.where(exact.all(), torch.zeros_like(t)) for name, t in moved.items()}
    if "w_o" in moved:
        other = att.with_parts(projections=replace(att.projections, **moved), check=False)
    else:
        other = _with_linear(att, moved, check=False)
    return other, exponents - by, exact.all()


def ordinary(att: Attention, *, projected: bool = False) -> Attention | None:
    """Return the layer in float64 without biases that J does not see, if its sizes are ordinary.

    With ``projected`` also those of ``w_o``. None where they are not.
    """
    own, sizes, *ends = _sizes(att)
    outer = [_exponents(own.w_o)] if projected and own.w_o is not None else []
    every = torch.cat([*sizes.values(), *outer, torch.tensor(ends, device=att.device)])
    if not bool(((every.abs() <= ORDINARY) | (every == ZERO)).all()):
        return None
    wide = att.dtype == torch.float64
    if wide and own.b_k is att.b_k and own.b_v is att.b_v and att.surroundings is None:
        return att
    scoring = att.scoring if wide else att.scoring.map(in_float64)
    other = att.with_parts(
        x=att.x.double(),
        projections=own.map(in_float64),
        scoring=scoring,
        surroundings=None,
        check=False,
    )
    other.cache.share(att.cache, *(("q", "p", "weights") if wide else ()), *WIDE)
    return other


def _sizes(att: Attention) -> tuple[Projections, dict[str, Tensor], int, int]:
    """Return projections without biases that J does not see, and exponents of sizes.

    Exponents of theirs by name, of that of x, and of ``scale``.
    """
    own, scoring = att.projections, att.scoring
    if scoring.plain("k") and scoring.shift_invariant:
        own = replace(own, b_k=None)
    if scoring.extra_scores is None and scoring.plain("v") and scoring.find(Gate) is None:
        own = replace(own, b_v=None)
    sizes = {name: _exponents(t) for name, t in own.tensors().items() if name != "w_o"}
    if (step := scoring.values_step) is not None:
        sizes |= {name: _exponents(t) for name, t in step.linear().items()}
    if isinstance(step, ValueNorm) and step.norm.over is not None:
        sizes["over"] = _exponents(step.norm.over[0][None]).expand(att.heads)
    if (other := att.other_stream) is not None:
        sizes |= {f"other {side}": _exponents(t) for side, t in other.tensors().items()}
    return own, sizes, int(_exponents(att.x[None])[0]), math.frexp(att.scale)[1]


def _exponents(t: Tensor) -> Tensor:
    """Return exponents of the largest entries of t (n, ...), (n,): `ZERO` where all are zero."""
    size = t.detach().flatten(1).abs().amax(1)  # an infinite norm of vectors takes longer
    return torch.where(size > 0, torch.frexp(size).exponent.long(), ZERO)


def _shifts(
    sizes: dict[str, Tensor], e_x: int, e_c: int, invariant: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Return exponents to change projections by when inputs change by -e_x, and those of logits.

    (heads,) each; those of the logits' sizes are 0 where unknown. ``invariant``: whether only
    products of queries and keys count.
    """

    def of(w: str, b: str, shift: int) -> Tensor:
        """Return the larger of a weight's and its bias's."""
        size = torch.where(sizes[w] == ZERO, ZERO, sizes[w] + shift)
        return torch.maximum(size, sizes[b]) if b in sizes else size

    e_q, e_k, e_v = of("w_q", "b_q", e_x), of("w_k", "b_k", e_x), of("w_v", "b_v", e_x)
    e_v = torch.where(e_v == ZERO, 0, e_v - e_x)
    q = k = logits = torch.zeros_like(e_q)
    if invariant:
        e_k = torch.where(e_k == ZERO, torch.where(e_q == ZERO, 0, -e_c - e_q), e_k)
        e_q = torch.where(e_q == ZERO, -e_c - e_k, e_q)
        logits = e_c + e_q + e_k
        q = logits // 2 - e_q
        k = e_c - q
    biases = {"b_q": q, "b_k": k, "b_v": -e_v - e_x}
    return biases | {"w_q": e_x + q, "w_k": e_x + k, "w_v": -e_v}, logits


def _times(t: Tensor, exponents: Tensor) -> Tensor:
    """Return t (n, ...), float64, times 2 to the exponents (n,).

    In steps whose factors are in the range of float64.
    """
    for i in range(4):
        bits = (((exponents + i) // 4).clamp(-1022, 1023) + 1023) << 52
        t = t * bits.view(torch.float64).view(-1, *[1] * (t.ndim - 1))
    return t
