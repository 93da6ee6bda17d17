"""Exact local Lipschitz constants: the spectral norm of the Jacobian of every head."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lipbound import deterministic
from lipbound.attention import Attention, projected
from lipbound.block import BLOCKS, BlockJacobian, block_bound
from lipbound.errors import LipboundError, UnknownNameError, nearest
from lipbound.gram import Gram
from lipbound.gram_variants import covered, gram_of
from lipbound.l2 import L2HeadJacobian
from lipbound.lanczos import golub_kahan, lanczos
from lipbound.layer import LayerJacobian
from lipbound.linalg import matrix_norm
from lipbound.operators import HeadJacobian, JacobianOperator
from lipbound.simple import dense_svd, power_iteration
from lipbound.solution import Norm
from lipbound.streaming import head_jacobian

MAPS = {
    "head": "one attention head without output projection, x -> softmax(q k^T) v",
    "head_out": "one attention head followed by its slice of the output projection",
    "heads": "all attention heads of a layer, side by side, without output projection",
    "layer": "multi-head attention: all heads of a layer, with the output projection",
    **BLOCKS,
}
WHOLE = ("heads", "layer", *BLOCKS)
"""Maps of a whole layer: one norm per sample, not per head."""
METHODS = ("lanczos", "golub-kahan", "power", "dense")
PROOFS = {"deflation": deterministic.deflation, "cholesky": deterministic.cholesky}
"""Methods with deterministic upper bounds, for maps whose J J^T has a closed form."""
DEFAULT_STEPS = {"lanczos": 500, "golub-kahan": 500, "power": 100}


def operator_norm(
    op: JacobianOperator,
    *,
    method: str = "lanczos",
    tol: float = 1e-4,
    delta: float | None = None,
    vectors: bool = False,
    seed: int | Sequence[int] = 0,
    max_steps: int | None = None,
) -> Norm:
    """Spectral norms of any `JacobianOperator`, one per batch entry; arguments as in `spectral_norm`.

    >>> import torch
    >>> from lipbound.operators import AutogradJacobian
    >>> op = AutogradJacobian(torch.sin, torch.zeros(3, dtype=torch.float64))
    >>> round(float(operator_norm(op).lower), 6)
    1.0
    """
    if method not in METHODS:
        raise UnknownNameError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    if not tol >= 0:
        raise LipboundError(f"tol is {tol}; it must be a number >= 0")
    if method == "dense":
        return dense_svd(op, vectors=vectors)
    steps = DEFAULT_STEPS[method] if max_steps is None else max_steps
    if steps < 1:
        raise LipboundError(f"max_steps is {steps}; at least one step is needed")
    if method == "power":
        if delta is not None:
            raise LipboundError("method 'power' gives no upper bound; use 'lanczos' or 'golub-kahan' with delta, or delta=None")
        with torch.no_grad():
            return power_iteration(op, tol=tol, max_steps=steps, seed=seed, vectors=vectors)
    solver = {"lanczos": lanczos, "golub-kahan": golub_kahan}[method]
    with torch.no_grad():
        return solver(op, tol=tol, max_steps=steps, seed=seed, delta=delta, vectors=vectors)


def spectral_norm(
    att: Attention,
    *,
    map: str = "head",
    method: str = "lanczos",
    tol: float = 1e-4,
    delta: float | None = None,
    vectors: bool = False,
    seed: int | Sequence[int] = 0,
    max_steps: int | None = None,
) -> Norm:
    r"""Exact local Lipschitz constant (2-norm of the Jacobian) of every head at every input.

    Args:
        att: the layer, samples x heads.
        map: "head" (no output projection), "head_out" (with the head's slice ``w_o``), "heads" (all heads side by side), "layer" (all heads,
            projected by ``w_o`` and added), or the layer with what stands around it: "residual" (x + layer(x)), "pre_norm" (h + layer(norm(h))),
            "post_norm" (norm(x + layer(x))); the last two need ``att.surroundings``, from ``lipbound.capture(..., around=True)``.
        method: "lanczos" (on J J^T in output coordinates, full reorthogonalisation), "golub-kahan", "power" (as papers define it: an
            absolute stopping rule, a lower estimate), "dense" (SVD in float64, small cases), or one of two whose ``upper`` is a proof without
            probability, in float64 whatever the dtype: "deflation" (`lipbound.deterministic.deflate`; memory as for Lanczos) and
            "cholesky" (`lipbound.deterministic.cholesky_bound`; memory three square matrices of order N d_v); these two cover maps "head" and
            "head_out" of every layer, and "heads" and "layer" of those without `lipbound.attention.VARIANTS`.
        tol: relative error of the norm at which the Lanczos methods stop (``upper / lower - 1`` where ``upper`` is asked for, else an
            a-posteriori estimate that fails with probability at most 1e-3 a norm); absolute change for "power".
        delta: total failure probability of the ``upper`` of all norms of this call, over the random start vectors
            (`lipbound.certificates`); None for plain estimates, which take about half the steps.
        vectors: also return the top singular pair.
        seed: of the random start vectors, which are independent across samples and heads; a sequence gives each sample its own.
        max_steps: 500 products by default (100 for "power"); where they do not suffice, ``converged`` is False.

    Returns:
        `Norm` with fields of shape (samples, heads), or (samples,) for maps of the whole layer; values in float64 whatever the dtype of
        ``att``, whose dtype the products have. ``upper`` is infinite unless ``delta`` is given or the method is "dense", "deflation" or
        "cholesky", whose upper ends hold for every ``delta``. With ``vectors``, ``left`` is (samples, heads, N, d_v), or (samples, heads, N, D_out)
        for "head_out", and ``right`` (samples, heads, N, D); without the axis of heads for a whole layer.

    Raises:
        LipboundError: unknown map or method, a method that does not cover the map of this layer, more memory needed than there is, overflow in
            float32.

    The Jacobian is that of the tensors given: P is computed once, from float64 scores, and rounded to their dtype; that rounding is part of
    neither ``error`` nor ``upper``.
    Where attention saturates, ``v_j - o_i`` cancels, and rounding adds an absolute error of the size of `rounding`; prefer float64 there.
    For a fixed seed the certificate presumes that the input was not chosen with knowledge of it.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> att = Attention(*(torch.randn(s, generator=g, dtype=torch.float64) for s in [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]))
    >>> torch.allclose(spectral_norm(att, tol=1e-9).lower, spectral_norm(att, method="dense").lower, rtol=1e-8)
    True
    """
    if map not in MAPS:
        raise UnknownNameError(f"unknown map {map!r}; {nearest(map, MAPS)}")
    if method not in (*METHODS, *PROOFS):
        raise UnknownNameError(f"unknown method {method!r}; {nearest(method, (*METHODS, *PROOFS))}")
    att = att.double() if method in PROOFS else att
    attention, basis = att.fold_output() if map == "head_out" else (att, None)
    unit = torch.ones(att.heads, dtype=torch.float64)
    if method != "power" and map not in BLOCKS:  # the former's absolute stopping rule must see J itself, and so must the identity of a residual
        attention, unit = attention.unit_values(together=map in WHOLE)
    op = _operator(attention, map)
    if method in PROOFS:
        if map in BLOCKS:
            raise LipboundError(f"method {method!r} has no closed form of map {map!r}; use 'lanczos' with delta")
        if not tol > 0:
            raise LipboundError(f"tol is {tol}; it must be a number > 0")
        norm = PROOFS[method](op, _grams(attention, map), tol=tol, seed=seed, vectors=vectors)
    else:
        norm = operator_norm(op, method=method, tol=tol, delta=delta, vectors=vectors, seed=seed, max_steps=max_steps)
    if map in WHOLE:
        return _scale(norm, unit.cpu()[0])
    norm = _scale(norm.view(att.samples, att.heads), unit.cpu())
    if norm.left is None or norm.right is None:
        return norm
    left = norm.left.view(att.samples, att.heads, *op.out_shape)
    if basis is not None:
        left = left @ basis.mT
    assert isinstance(op, HeadJacobian)
    return replace(norm, left=left, right=op.lift(norm.right).view(att.samples, att.heads, att.tokens, -1))


def _operator(att: Attention, map: str) -> JacobianOperator:
    if map in BLOCKS:
        return BlockJacobian(att, map)
    return LayerJacobian(att, project=map == "layer") if map in WHOLE else head_jacobian(att)


def _grams(att: Attention, map: str) -> list[Callable[[], Gram]]:
    """J J^T for every entry of the batch, made when it is needed."""
    if map in WHOLE:
        w_o = att.w_o if map == "layer" else None
        covered(att, list(range(att.heads)), w_o)
        return [partial(gram_of, att, s, list(range(att.heads)), w_o) for s in range(att.samples)]
    return [partial(gram_of, att, s, [h]) for s in range(att.samples) for h in range(att.heads)]


def l2_spectral_norm(att: Attention, *, tol: float = 1e-4, delta: float | None = None, seed: int | Sequence[int] = 0) -> Norm:
    """Exact local Lipschitz constant of L2 attention with the layer's weights (see `L2HeadJacobian`), samples x heads.

    This is the map that Kim et al. 2021 bound; it is not the head of the checkpoint.
    """
    scaled, unit = att.unit_values()
    return _scale(operator_norm(L2HeadJacobian(scaled), tol=tol, delta=delta, seed=seed).view(att.samples, att.heads), unit.cpu())


def rounding(att: Attention, *, map: str = "head") -> Tensor:
    r"""Size of the absolute error that rounding of q, k, v and P leaves in the norms of a layer, (samples, heads) or (samples,), float64.

    For one head :math:`\varepsilon\,\max_i|v_i|\,(\max_i|c W_K q_i| + \max_j|c W_Q k_j|)`, v and k centred and c = ``scale``
    (products of norms where there are rotations, normalised queries or keys, caps or sinks): the differences
    ``v_j - o_i`` of J cancel where attention saturates. To this comes the rounding of scores in float64, relative to
    :math:`\|W_V\|_F` and to the same product. For whole layers the heads' errors, times :math:`\|W_O^h\|` for "layer", add up. Far below the norm
    on ordinary heads; an estimate of size, not a bound.
    """

    def longest(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=-1).amax(-1).double()

    q, k, v = longest(att.q), longest(att.centred_k), longest(att.centred_v)
    if att.variants:
        gradient = abs(att.scale) * (q * _largest_slope(att, "k") + k * _largest_slope(att, "q"))
    else:
        gradient = abs(att.scale) * (longest(att.q @ att.w_k.mT) + longest(att.centred_k @ att.w_q.double().mT))
    error = torch.finfo(att.dtype).eps * gradient * v
    error = error + torch.finfo(torch.float64).eps * abs(att.scale) * q * k * (torch.linalg.matrix_norm(att.w_v.double()) + gradient * v)
    if map in WHOLE:
        total = (error if map == "heads" or att.w_o is None else error * matrix_norm(att.w_o)).sum(-1)
        return block_bound(att, total, map) - block_bound(att, torch.zeros_like(total), map) if map in BLOCKS else total
    return error


def _largest_slope(att: Attention, side: str) -> Tensor:
    """How much a token's query or key can change with its token at most, about: the largest gain / s times ||W||, (samples, heads)."""
    w, b, norm = (att.w_q, att.b_q, att.norm_q) if side == "q" else (att.w_k, att.b_k, att.norm_k)
    size = matrix_norm(w).expand(att.samples, -1) * (1.0 if att.rotation is None else att.rotation.norm)
    if norm is None:
        return size
    s = norm.sizes(att.x, projected(att.x, w, b))[..., 0]
    s = s if att.valid is None else s.masked_fill(~att.valid[:, None], torch.inf)
    return size * norm.gain.double().abs().amax(-1) / s.amin(-1)


def _scale(norm: Norm, unit: Tensor) -> Norm:
    return replace(norm, lower=norm.lower * unit, upper=norm.upper * unit)
