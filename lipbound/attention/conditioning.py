r"""Condition numbers of attention in low precision, of heads or of whole layers: Baek 2026.

Jinwoo Baek, "Numerical Fragility in Transformers" (AISTATS 2026, arXiv:2510.21770). The definitions
are those of the code released with the paper, which looks at some rows of P, by power iteration;
here the Jacobians of all rows count, to rounding. They are no bounds on a head's Jacobian.
"""

import math

import torch
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention
from lipbound.attention.rounding import probability_error
from lipbound.attention.softmax import largest_jacobian_norm
from lipbound.devices import in_own_modes, require
from lipbound.errors import choice
from lipbound.schema import CONDITIONING

BFLOAT16 = 2.0**-8
"""Unit roundoff of bfloat16, that of `rho_ln`; float16 has an eighth of it."""
_MATRICES = 8
"""Number of float64 matrices of the size of P that are in memory meanwhile."""
_ERROR = 2.5e-7
"""Relative error of P, times what it grows by, from which on nothing is said: a quarter of 1e-6."""


@memoised
def row_norm(att: Attention) -> Tensor:
    """Largest norm of the softmax Jacobian diag(p) - p p^T of a row of P, (samples, heads).

    In float64, to a relative error of 1e-6; NaN where rounding may be more. A sink is one more
    entry of every row.
    """
    p = att.double().p
    if att.sinks is not None:
        p = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp_min(0)], -1)
    return torch.where(probability_error(att) <= _ERROR, largest_jacobian_norm(p), torch.nan)


@in_own_modes
@torch.no_grad()
def conditioning(att: Attention | ModuleAttention, name: str, *, whole: bool = False) -> Tensor:
    r"""One of the condition numbers of Baek 2026, at every input.

    With :math:`\|\cdot\|_F` the Frobenius norm, S the scores as they enter the softmax (scaled and
    capped, position biases added, forbidden entries and padding left out), P their softmax, Q, K
    and V as they enter (biases and rotations included), and :math:`J = \max_i \|\mathrm{diag}(P_i)
    - P_i P_i^T\|`:

    - ``kappa_softmax``: :math:`J\,\|S\|_F / \|P\|_F`, how relative errors of S grow in P;
    - ``chi_score``: :math:`J\,|c|\,\|Q\|_F \|K\|_F / \|P\|_F`, how those of Q and K do, c the scale
      of the scores;
    - ``kappa_val``: :math:`\|P\|_F\,\sigma(V) / \|P V\|_F`, :math:`\sigma` the largest singular
      value: how those of P grow in outputs; at least 1;
    - ``rho_ln``: :math:`D\,u\,\overline{\sigma^2} / eps` of the LayerNorm that feeds the layer,
      :math:`\overline{\sigma^2}` the mean of its inputs' variances over tokens, D their width, eps
      its own, and u the unit roundoff of bfloat16: what rounding makes of the variance, beside eps.
      The authors' code takes the larger of it and that of the LayerNorm before the block's MLP.

    Args:
        att: the layer. name: which.
        whole: of all heads together, as the authors' code does: squared norms added up, the largest
            J and :math:`\sigma(V)`. ``rho_ln`` is that of the layer anyway.

    Returns:
        (samples, heads), or (samples, 1) of all heads, float64. NaN for what there is not: layers
        by automatic differentiation, J with sinks, a LayerNorm in front that was not found (or
        RMSNorm), and where rounding of P may be more than 1e-6 of the number: as where P V cancels.

    Raises:
        UnknownNameError: another name.
        LipboundError: the memory for P and scores is not free.
    """
    choice("condition number", name, CONDITIONING)
    nothing = torch.full((att.samples, 1 if whole else att.heads), math.nan, dtype=torch.float64)
    if isinstance(att, ModuleAttention):
        return nothing
    rows, keys = att.valid_rows, att.valid_keys
    entries = (-3, -2, -1) if whole else (-2, -1)

    def unit(t: Tensor) -> Tensor:
        """The largest entries, of which squares of quotients stay in range."""
        return t.abs().amax(entries, keepdim=True).clamp_min(1e-300)

    def size(t: Tensor) -> Tensor:
        """Frobenius norms."""
        return ((t / unit(t)).square().sum(entries, keepdim=True).sqrt() * unit(t))[..., 0, 0]

    def largest(t: Tensor) -> Tensor:
        return t.amax(-1, keepdim=True) if whole else t

    if name == "rho_ln":
        norm = None if att.surroundings is None else att.surroundings.fed_by
        if norm is None or not norm.centred:
            return nothing
        variances = norm.x.double().var(-1, correction=0)
        real = torch.ones_like(variances) if att.valid is None else att.valid.double()
        mean = ((variances * real).sum(-1) / real.sum(-1))[:, None]
        return (mean * (norm.x.shape[-1] * BFLOAT16) / norm.eps).expand(nothing.shape)
    what = f"{name} needs the attention matrices of all heads at {att.tokens} tokens"
    needed = _MATRICES * 8.0 * att.samples * att.heads * att.rows * att.keys
    require(needed, att.device, what, "measure shorter inputs or fewer samples, or leave it out")
    p = att.double().p
    if name == "kappa_val":
        v = _counted(att.wide_v, keys)
        v = v / unit(v)
        squares = torch.linalg.eigvalsh((v.mT @ v).cpu())[..., -1].clamp_min(0).to(att.device)
        found = size(p) * largest(squares.sqrt()) / size(p @ v)
    elif att.sinks is not None:
        return nothing
    elif name == "kappa_softmax":
        logits, hidden = att.logits()
        scores = logits if att.mask is None else logits + att.mask
        found = size(scores.masked_fill(hidden, 0.0)) * largest(row_norm(att)) / size(p)
    else:
        q, k = size(_counted(att.wide_q, rows)), size(_counted(att.wide_k, keys))
        found = abs(att.scale) * q * k * largest(row_norm(att)) / size(p)
    known = largest(probability_error(att)) * found.clamp_min(1) <= _ERROR
    return torch.where(known, found, torch.nan)


def _counted(t: Tensor, valid: Tensor | None) -> Tensor:
    """Return vectors of tokens, zero for padding."""
    return t if valid is None else t * valid[:, None, :, None]
