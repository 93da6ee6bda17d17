"""What a report shows of a single head beyond the numbers of the run: attention, singular vectors, and where the norm comes from."""

from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from lipbound.attention import softmax
from lipbound.attention.layer import Attention
from lipbound.bounds.terms import shares
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.models.capture.capture import Capturer
from lipbound.runs.replay import Replay

SIDE = 128
"""Attention maps of more tokens are shrunk to at most this many rows: each entry then is the largest of a square."""
TOL = 1e-6
"""Of the singular vectors: well below what a picture shows."""


class Details(NamedTuple):
    """Of one layer at one sample.

    Attributes:
        norm: the heads' exact norms.
        attention: (heads, n, n) uint8, 255 sqrt(P) rounded; shrunk by ``stride``.
        softmax_norm: of every query's row, (heads, N).
        right, left: squared lengths of the tokens' parts of the top singular vectors, (heads, N), each row summing to one: which tokens, moved,
            change the output most; and which tokens' outputs change.
        parts: shares of the exact norm that pass through values, keys and queries, each (heads,), summing to one.
        bounds: `lipbound.bounds.terms.shares` of every bound that has terms: name -> term -> (heads,).
        stride: see ``attention``.
    """

    norm: np.ndarray
    attention: np.ndarray
    softmax_norm: np.ndarray
    right: np.ndarray
    left: np.ndarray
    parts: dict[str, np.ndarray]
    bounds: dict[str, dict[str, np.ndarray]]
    stride: int


def details(rerun: Replay, ds: xr.Dataset, sample: int) -> list[Details]:
    """`Details` of every layer of a run, at the sample at one position."""
    capturer = Capturer(rerun.checkpoint.model, ds["layer"].values.tolist())
    layers = capturer.run(rerun.inputs.block(sample, sample + 1, rerun.device))
    with torch.no_grad():
        return [of_layer(layer.attention, ds.attrs["map"], ds.attrs["bounds"]) for layer in layers]


def of_layer(att: Attention, map: str, names: list[str]) -> Details:
    """`Details` of the heads of a layer with one sample; padding is left out."""
    att = att.unpadded(0)
    norm = spectral_norm(att, map=map, tol=TOL, vectors=True)
    assert norm.left is not None
    assert norm.right is not None
    left, right = norm.left[0].double(), norm.right[0].double()
    folded = att.fold_output()[0] if map == "head_out" else att
    found = {name: shares(folded, name) for name in names}
    stride = -(-att.tokens // SIDE)
    return Details(
        norm=norm.lower[0].numpy(),
        attention=(255 * _shrunk(att.p[0], stride).double().sqrt()).round().to(torch.uint8).cpu().numpy(),
        softmax_norm=softmax.jacobian_norm(_whole_rows(att)).upper.cpu().numpy(),
        right=(right**2).sum(-1).cpu().numpy(),
        left=(left**2).sum(-1).cpu().numpy(),
        parts={name: share.cpu().numpy() for name, share in parts(att, map, left, right).items()},
        bounds={name: {term: v[0].cpu().numpy() for term, v in terms.items()} for name, terms in found.items() if terms is not None},
        stride=stride,
    )


def _whole_rows(att: Attention) -> Tensor:
    """Probabilities of the first sample, and that of the sink where there is one, (heads, N, N or N + 1)."""
    p = att.p[0]
    return p if att.sinks is None else torch.cat([p, (1 - p.double().sum(-1, keepdim=True)).clamp_min(0).to(p.dtype)], -1)


def parts(att: Attention, map: str, left: Tensor, right: Tensor) -> dict[str, Tensor]:
    r"""How much of :math:`u^T J v` passes through values, keys and queries, as fractions that sum to one, (heads,).

    J is the sum of three Jacobians, of what happens when values, keys or queries alone depend on the input; u, v is the top singular pair, left
    (heads, N, d_v or D_out) and right (heads, N, D).
    """
    if map == "head_out":
        assert att.w_o is not None
        left = left @ att.w_o.double().mT  # u^T (f W_O) = (u W_O^T)^T f
    outputs = HeadJacobian(att.double()).paths(right)
    forms: dict[str, Any] = {name: (left * out).sum((-1, -2)) for name, out in outputs.items()}
    total = sum(forms.values())
    return {name: torch.where(total > 0, form / torch.where(total > 0, total, 1.0), 0.0) for name, form in forms.items()}


def _shrunk(p: Tensor, stride: int) -> Tensor:
    """The largest entry of every square of ``stride`` x ``stride``."""
    return p if stride == 1 else torch.nn.functional.max_pool2d(p, stride, ceil_mode=True)
