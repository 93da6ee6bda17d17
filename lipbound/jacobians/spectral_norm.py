"""Exact local Lipschitz constants: spectral norms of Jacobians of heads, or of whole layers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.attention.rescaling import unit_values
from lipbound.devices import in_own_modes
from lipbound.errors import check_layer, choice, flag
from lipbound.jacobians.automatic import AutomaticJacobian
from lipbound.jacobians.head import HeadOperator
from lipbound.jacobians.in_range import in_range
from lipbound.jacobians.l2_attention import L2HeadJacobian
from lipbound.jacobians.maps import MAPS, WHOLE, check_wrt
from lipbound.jacobians.one_side import own_block_norms
from lipbound.jacobians.streaming import by_rows_if_full
from lipbound.linalg.enclose import SEEN, Problem, enclose, estimate
from lipbound.linalg.operator_norm import (
    DEFAULT_STEPS,
    check_search,
    dense_svd,
    operator_norm,
    power_iteration,
)
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm, sample_seeds, seeds_each, widened
from lipbound.schema import INPUT


@in_own_modes
def spectral_norm(
    att: Attention | ModuleAttention,
    *,
    map: str = "head",
    method: str = "lanczos",
    tol: float = 1e-4,
    delta: float | None = None,
    wrt: str = INPUT,
    vectors: bool = False,
    seed: int | Sequence[int] = 0,
    max_steps: int | None = None,
) -> Norm:
    r"""Exact local Lipschitz constant (2-norm of the Jacobian) of every head at every input.

    Args:
        att: the layer, samples x heads. One without closed form (`ModuleAttention`) is measured by
            automatic differentiation, whose rounding is not enclosed.
        map: "head" (no output projection), "head_out" (with the head's slice ``w_o``), "heads" (all
            heads side by side), "layer" (all heads, projected by ``w_o`` and added), or the layer
            with what stands around it: "residual" (x + layer(x)), "pre_norm" (h + layer(norm(h))),
            "post_norm" (norm(x + layer(x))); the last two need ``att.surroundings``, from
            ``lipbound.capture(..., around=True)``.
        method: "lanczos" (on J J^T, with full reorthogonalisation; with ``delta`` in float64) and
            "power" (as papers define it: an absolute stopping rule, no upper end) search in the
            dtype of ``att``. "dense"
            (singular values, for small cases) works in float64, and its ``upper`` needs no
            probability.
        tol: relative error of the norm at which Lanczos' method stops (``upper / lower - 1`` where
            ``upper`` is asked for, else an a-posteriori estimate that fails with probability at
            most 1e-3 a norm); absolute change for "power". Ten times smaller than that of
            `lipbound.compare`, since without ``delta`` nothing encloses what is left.
        delta: total failure probability of the ``upper`` of all norms of this call, over random
            start vectors (`lipbound.linalg.enclose`); one start carries about 1e-7 a norm at 128
            tokens and ``tol`` 1e-3; smaller values take independent starts, whose probabilities are
            multiplied. None, the default, for lower ends alone, in less than half of the time;
            `lipbound.compare`, whose numbers are kept and cited, encloses them by default.
        wrt: what a head is a function of, everything else held at its value: "input" (the tokens),
            or "keys", "values" or "queries" alone, for the maps "head" and "head_out": what an
            error in a cache of keys or values does to an output. Keys and queries are those that
            enter the scores, after normalisation and rotation; values those that are averaged. Each
            head has its own: keys that several heads share are moved for one of them.
        vectors: also return the top singular pair.
        seed: of the random start vectors, which are independent across samples and heads; a
            sequence gives each sample its own.
        max_steps: 500 products of each run by default (100 for "power"); where they do not suffice,
            ``converged`` is False.

    Returns:
        `Norm` with fields of shape (samples, heads), or (samples,) for maps of the whole layer;
        values in float64, vectors in the dtype of ``att``. ``upper`` is infinite unless ``delta``
        is given, the method is "dense", or queries alone move (cross-attention, ``wrt="queries"``):
        upper ends of the last two hold for every ``delta``.
        With ``vectors``, ``left`` is (samples, heads, N, d_v), or (samples, heads, N, D_out) for
        "head_out", and ``right`` (samples, heads, N, D); without the axis of heads for a whole
        layer, and with d or d_v for D where keys, queries or values move.

    Raises:
        LipboundError: unknown map or method, numbers that make no sense, a method that does not
            cover the map of this layer, more memory needed than there is, overflow, a float64 layer
            whose largest entries are neither 0 nor from 1e-60 to 1e60.

    The Jacobian is that at the numbers given, in exact arithmetic: every rounding, from scores and
    softmax to the recurrences, is inside ``lower`` and ``upper`` (all methods but "power"). Where
    logits are so large that rounding alone is wider than ``tol``, ``converged`` is False, and
    ``limited`` True. For a fixed seed the certificate presumes that the input was not chosen with
    knowledge of lipbound's own random stream; what torch or numpy draw with any seed is independent
    of it. Without ``delta`` the search for norms of a float32 layer is in float32 where ``tol`` is
    at least 4e-6, and ``error`` no less; a norm that float32 cannot resolve is found in float64, or
    ``converged`` is False.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g).double() for shape in shapes))
    >>> dense = spectral_norm(att, method="dense")
    >>> torch.allclose(spectral_norm(att, tol=1e-9).lower, dense.lower, rtol=1e-8)
    True
    """
    choice("map", map, MAPS)
    tol, steps = check_search(method, tol, delta, max_steps)
    side, vectors = check_wrt(wrt, map), flag("vectors", vectors)
    if isinstance(att, ModuleAttention) and side is None:
        options: dict[str, Any] = {"delta": delta, "vectors": vectors, "max_steps": max_steps}
        op, seeds = AutomaticJacobian(att, map), sample_seeds(att.samples, seed)
        norm = operator_norm(op, method=method, tol=tol, seed=seeds, **options)
        return norm if map in WHOLE else norm.view(att.samples, att.heads)
    check_layer(att, "spectral_norm" if side is None else f"wrt={wrt!r}")
    assert not isinstance(att, ModuleAttention)
    narrow = delta is None and method == "lanczos" and att.dtype == torch.float32 and tol >= SEEN

    def measure() -> Norm:
        # in range, the operator, an allowance for its rounding, and the search
        wide = in_range(att if method == "power" else att.double(), map, side)
        op = wide.jacobian(estimate=narrow)
        allowance, search = cache(partial(wide.allowance, op)), op
        if narrow:  # products in float32, where heads of float64 have them
            heads = op.single() if isinstance(op, HeadOperator) else None
            search = heads or in_range(att, map, side).jacobian(estimate=True)
        # where queries alone move, every output follows its own token alone
        follows = not wide.layer.values_move if side is None else side == "q"
        if follows and method != "power" and isinstance(op, HeadOperator):
            norm = own_block_norms(op, allowance(), tol=tol, vectors=vectors)
        elif method == "dense":
            by = allowance().tensors + allowance().products
            norm = widened(dense_svd(op, vectors=vectors), by, tol)
        elif method == "power":  # on J in its dtype, by changes in the units of the layer
            least, seeds = tol * 0.5 ** wide.exponents.double(), sample_seeds(att.samples, seed)
            per = least.repeat(op.batch // len(least))
            norm = power_iteration(op, tol=per, max_steps=steps, seed=seeds, vectors=vectors)
        else:
            seeds = seeds_each(op.batch, sample_seeds(att.samples, seed))
            problem = Problem(op, allowance, search, tol, steps, seeds)
            if delta is None:
                norm = estimate(problem, vectors=vectors)
            else:
                norm = enclose(problem, delta, vectors=vectors)
        if method != "power":
            noise = allowance().tensors + allowance().products
            ended = ~norm.converged & (norm.steps < steps)  # by rounding, with steps left
            norm = replace(norm, limited=ended | ~(4 * noise <= tol * norm.lower))
        return wide.brought_back(norm, op, att.dtype)

    return by_rows_if_full(att, measure)


@in_own_modes
@torch.no_grad()
def l2_spectral_norm(att: Attention, *, tol: float = 1e-4, seed: int | Sequence[int] = 0) -> Norm:
    """Exact local Lipschitz constant of L2 attention with the layer's weights, samples x heads.

    See `L2HeadJacobian`. This is the map that Kim et al. 2021 bound; it is not the head of the
    checkpoint. The search is in the dtype of ``att``, in float64 for a ``tol`` below 4e-6; the
    value is a quotient in float64, without enclosure: rounding is not counted.
    """
    wide, exponents = unit_values(att.double())
    op = L2HeadJacobian(wide)
    search = op.to(torch.float32) if att.dtype == torch.float32 and tol >= SEEN else op
    steps, seeds = DEFAULT_STEPS["lanczos"], sample_seeds(att.samples, seed)
    rounding = partial(Roundoff, *torch.zeros(3, op.batch, dtype=torch.float64))
    problem = Problem(op, rounding, search, tol, steps, seeds_each(op.batch, seeds))
    return estimate(problem).view(att.samples, att.heads).times_power(exponents)
