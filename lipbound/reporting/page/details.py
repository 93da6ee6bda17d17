"""Attention, singular vectors and terms of the norm of single heads, for a report."""

from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.bounds.registry import get
from lipbound.errors import AttentionError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.token_norms.token_norm import token_norm, token_profile
from lipbound.models.capture.capture import Capturer
from lipbound.runs.verify import Replay
from lipbound.schema import TOKEN_NORMS, bounds_there, norm_of

SIDE = 128
"""Attention maps of more tokens are shrunk to at most this many rows: each entry then is the
largest of a square."""
TOL = 1e-6
"""Tolerance of the singular vectors, well below what a picture shows."""
TOKEN_TOL = 1e-3
"""The same in norms that tell tokens apart, where what is left open costs more to close."""


class Details(NamedTuple):
    """Details of the heads of one layer at one sample.

    Attributes:
        norm: the heads' exact norms, in the run's.
        attention: (heads, n, n) uint8, 255 sqrt(P) rounded; shrunk by ``stride``.
        softmax_norm: of every query's row, (heads, N).
        right, left: shares of the tokens in :math:`u^T J v`, (heads, N), each row summing to one:
            of those that the steepest perturbation v moves, and of those whose outputs change along
            u. In the Frobenius norm these are the squared lengths of the tokens' parts of the top
            singular vectors.
        alone, reached: `lipbound.token_profile`, (heads, N): how far all outputs go when a token
            moves alone, and an output when all tokens do.
        parts: shares of the exact norm that pass through values, keys and queries, each (heads,),
            summing to one.
        bounds: `lipbound.bounds.Bound.terms` of every bound that has terms: name -> term ->
            (heads,).
        stride: see ``attention``.
    """

    norm: np.ndarray
    attention: np.ndarray
    softmax_norm: np.ndarray
    right: np.ndarray
    left: np.ndarray
    alone: np.ndarray
    reached: np.ndarray
    parts: dict[str, np.ndarray]
    bounds: dict[str, dict[str, np.ndarray]]
    stride: int


def details(rerun: Replay, ds: xr.Dataset, sample: int) -> list[Details | None]:
    """Compute `Details` of every layer of a run, at the sample at one position.

    None stands for a layer without a closed form, for cross-attention, and for layers whose samples
    are windows.

    Raises:
        AttentionError: there are none of any layer.
    """
    capturer = Capturer(rerun.checkpoint.model, ds["layer"].values.tolist())
    found = capturer.run(rerun.inputs.block(sample, sample + 1, rerun.device))
    names, norm, each = bounds_there(ds), norm_of(ds), list[Details | None]()
    for layer in found:
        att, one = layer.attention, None
        if isinstance(att, Attention) and layer.windows == 1 and att.kind == "self":
            with torch.no_grad():
                one = of_layer(att, ds.attrs["map"], names, norm)
        each.append(one)
    if not any(each):
        raise AttentionError("no layer is self-attention in closed form that sees whole samples")
    return each


def of_layer(att: Attention, map: str, names: list[str], norm: str = "frobenius") -> Details:
    """Compute `Details` of the heads of a layer with one sample.

    The norm is one of `lipbound.schema.NORMS`; padding is left out.
    """
    att = att.unpadded(0)
    if norm in TOKEN_NORMS:
        found_norm = token_norm(att, norm, map=map, tol=TOKEN_TOL, vectors=True)
    else:
        found_norm = spectral_norm(att, map=map, tol=TOL, vectors=True)
    assert found_norm.left is not None
    assert found_norm.right is not None
    left, right = found_norm.left[0].double(), found_norm.right[0].double()
    parts, moved = shares(att, map, left, right)
    profile = token_profile(att, map=map)
    folded = att.fold_output()[0] if map == "head_out" else att
    found = {name: get(name).terms(folded) for name in names}
    there = {name: terms for name, terms in found.items() if terms is not None}
    bounds = {name: {k: _array(v[0]) for k, v in terms.items()} for name, terms in there.items()}
    stride = -(-att.tokens // SIDE)
    rows = att.p[0]
    if att.sinks is not None:  # whose probability belongs to every row
        sink = (1 - rows.double().sum(-1, keepdim=True)).clamp_min(0)
        rows = torch.cat([rows, sink.to(rows.dtype)], -1)
    # the largest entry of every square
    shrunk = torch.nn.functional.max_pool2d(att.p[0], stride, ceil_mode=True)
    maps = (255 * shrunk.double().sqrt()).round()
    return Details(
        norm=_array(found_norm.lower[0]),
        attention=_array(maps.to(torch.uint8)),
        softmax_norm=_array(softmax.jacobian_norm(rows).upper),
        right=_array(moved),
        left=_array((left**2).sum(-1)),
        alone=_array(profile.lower[0]),
        reached=_array(profile.output_lower[0]),
        parts={name: _array(share) for name, share in parts.items()},
        bounds=bounds,
        stride=stride,
    )


def _array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()


def shares(
    att: Attention, map: str, left: Tensor, right: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    r"""Shares of :math:`u^T J v` by what it passes through, and by the tokens that move.

    J is the sum of three Jacobians, of what happens when values, keys or queries alone depend on
    the input; v is the steepest perturbation and u the direction of the output, left (heads, N, d_v
    or D_out) and right (heads, N, D).

    Returns:
        Of values, keys and queries, (heads,) each, and of the tokens, (heads, N); both sum to one.
    """
    op = HeadJacobian(att.double())
    if map == "head_out":  # u^T (f W_O) = (u W_O^T)^T f
        assert att.w_o is not None
        left = left @ att.w_o.double().mT
    forms = {name: (left * out).sum((-1, -2)) for name, out in op.paths(right).items()}
    total = torch.stack(list(forms.values())).sum(0)
    parts = {name: _share(form, total, torch.zeros_like(form)) for name, form in forms.items()}
    moved = (op.lift(op.vjp(left)) * right).sum(-1).clamp_min(0)  # v is the best for u: none is < 0
    return parts, _share(moved, moved.sum(-1, keepdim=True), (right**2).sum(-1))


def _share(form: Tensor, total: Tensor, instead: Tensor) -> Tensor:
    """Shares of a total where that is positive."""
    return torch.where(total > 0, form / torch.where(total > 0, total, 1.0), instead)
