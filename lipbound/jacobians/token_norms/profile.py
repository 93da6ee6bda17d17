"""Sensitivity of a head to each of its tokens, and of each of its output tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes
from lipbound.formatting import TABLE_ROWS, html_table, number
from lipbound.jacobians.maps import WHOLE
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.token_norms.token_norm import (
    beside,
    check,
    chunks,
    matrices,
    pieces,
    tensors_of,
)
from lipbound.linalg.matrix_norms import UNIT, at_most, symmetric_norm, times_power, times_power_up


@dataclass(frozen=True)
class TokenProfile:
    r"""Norms of single tokens' parts of a Jacobian, each between two ends.

    Float64, (samples, heads, N), or (samples, N) for a whole layer.

    Attributes:
        lower, upper: of :math:`\|J_{:j}\|`, how far all outputs move (Frobenius norm) when token j
            alone does.
        output_lower, output_upper: of :math:`\|J_{i:}\|`, how far output token i moves when all
            tokens do (Frobenius norm).
        map: which map this is of.
    """

    lower: Tensor
    upper: Tensor
    output_lower: Tensor
    output_upper: Tensor
    map: str = "head"

    def _repr_html_(self) -> str:
        n, ends = (
            self.lower.shape[-1],
            (self.lower, self.upper, self.output_lower, self.output_upper),
        )
        columns = [t.reshape(-1, n)[0].tolist() for t in ends]
        rows = [[str(j), *(number(t[j], 6) for t in columns)] for j in range(min(n, TABLE_ROWS))]
        title = f"Token profile, {' x '.join(map(str, self.lower.shape))}, the first of them"
        names = ["token", "moved: lower", "upper", "output: lower", "upper"]
        return html_table(names, rows, title=title, most=TABLE_ROWS)


@in_own_modes
def token_profile(att: Attention, *, map: str = "head") -> TokenProfile:
    r"""Exact norms of each token's column of blocks of the Jacobian, and of each output's row.

    The largest of the first is `token_norm` in the norm "one-token", that of the second in
    "output-token": Lemma 92 (docs/theory/token_norms.md). Deterministic, rounding included; padding
    has zeros. Every token takes an eigenvalue problem of order 2 d + d_v (or D, for a whole layer)
    and one of order d_v.

    Args:
        att: the layer, samples x heads.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`.

    Returns:
        `TokenProfile`.

    Raises:
        LipboundError: an unknown map, or one without its output projection.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g).double() for shape in shapes))
    >>> token_profile(att).lower.shape
    torch.Size([1, 2, 6])
    """
    check(att, "token_profile", map)
    found = [_ends(part, map) for part in pieces(att, map)]

    def joined(several: Sequence[Tensor], dim: int) -> Tensor:
        return torch.cat(list(several), dim)

    sides = [beside(ends, att.samples, map, joined) for ends in zip(*found, strict=True)]
    lower, upper, output_lower, output_upper = sides
    return TokenProfile(lower, upper, output_lower, output_upper, map)


@torch.no_grad()
def _ends(att: Attention, map: str) -> list[Tensor]:
    """Both ends of columns, then of rows, of one of the `pieces` of a layer."""
    measured, whole = PreparedMap(att.double(), map), map in WHOLE
    parts = tensors_of(measured)
    shape = (att.samples, att.tokens) if whole else (att.samples, att.heads, att.tokens)
    exponents = measured.exponents[:1] if whole else measured.exponents.repeat(att.samples)
    real = torch.ones(att.samples, att.tokens, dtype=torch.bool)
    real = real if att.valid is None else att.valid.cpu()
    real = real if whole else real[:, None].expand(shape)
    error = measured.roundoff.tensors.cpu()[:, None] * (1 + 1e-6)
    ends: list[Tensor] = []
    for columns in (True, False):
        found = [
            torch.cat(
                [_norms(*matrices(parts.of_maps(maps), r, columns=columns)) for r in rows], -1
            )
            for maps, rows in chunks(parts)
        ]
        lower, upper = torch.cat(found, 1).cpu()
        lower = torch.nan_to_num(lower - error, nan=0.0, posinf=0.0).clamp_min(0)
        upper = upper + error + parts.vanished.cpu()[:, None]
        upper = torch.nan_to_num(upper, nan=math.inf, posinf=math.inf)
        lower = times_power(lower, exponents[:, None])
        upper = times_power_up(upper, exponents[:, None]).view(shape)
        lower = torch.where(lower < 1e-300, 0.0, lower).view(shape)
        if measured.known is not None:
            known = measured.known.cpu()[..., None].expand(shape)
            lower, upper = torch.where(known, lower, 0.0), torch.where(known, upper, math.inf)
        ends += [torch.where(real, lower, 0.0), torch.where(real, upper, 0.0)]
    return ends


def _norms(g: Tensor, slack: Tensor) -> Tensor:
    """Both ends of roots of the largest eigenvalues of matrices (b, i, n, n), (2, b, i).

    The matrices are positive semi-definite, and known up to ``slack``.
    """
    n = g.shape[-1]
    try:
        values, vectors = torch.linalg.eigh(g)
    except RuntimeError:  # LinAlgError
        values, vectors = torch.zeros_like(g[..., 0]), torch.ones_like(g)
    x = vectors[..., -1]
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    image = (g @ x[..., None])[..., 0]
    size = torch.linalg.matrix_norm(g)
    rayleigh = (x * image).sum(-1) - (4 * n + 16) * UNIT * size
    upper = values[..., -1].clamp_min(0) * (1 + 1e-11) + 64 * n * (n + 2) * UNIT * size
    unproved = ~at_most(g, upper)
    if bool(unproved.any()):
        upper[unproved] = symmetric_norm(g[unproved])
    lower = (rayleigh - slack).clamp_min(0).sqrt() * (1 - 1e-15)
    return torch.stack([lower, (upper + slack).sqrt() * (1 + 1e-15)])
