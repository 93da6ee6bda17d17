"""How sensitive a head is to each of its tokens, and how sensitive each of its output tokens is."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes
from lipbound.formatting import number
from lipbound.formatting.html import ROWS, html_table
from lipbound.jacobians.maps import WHOLE
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.token_norms.layer_tensors import LayerTensors
from lipbound.jacobians.token_norms.token_norm import beside, check, chunks, parts_of, pieces
from lipbound.linalg.matrix_norms import UNIT, at_most, symmetric_norm
from lipbound.linalg.powers import times_power, times_power_up


@dataclass(frozen=True)
class TokenProfile:
    r"""Norms of single tokens' parts of a Jacobian, each between two ends, float64: (samples,
    heads, N), or (samples, N) for a whole layer.

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
        n = self.lower.shape[-1]
        lower, upper, own, above = (
            t.reshape(-1, n)[0]
            for t in (self.lower, self.upper, self.output_lower, self.output_upper)
        )
        rows = [
            [str(j), *(number(float(t[j]), 6) for t in (lower, upper, own, above))]
            for j in range(min(n, ROWS))
        ]
        title = f"Token profile, {' x '.join(map(str, self.lower.shape))}, the first of them"
        return html_table(
            ["token", "moved: lower", "upper", "output: lower", "upper"],
            rows,
            title=title,
            most=ROWS,
        )


@in_own_modes
def token_profile(att: Attention, *, map: str = "head") -> TokenProfile:
    r"""Exact norms of each token's column of blocks of the Jacobian, and of each output token's row
    of blocks.

    The largest of the first is `token_norm` in the norm "one-token", that of the second in
    "output-token": Lemma 92 (docs/theory/token_norms.md). Deterministic, rounding included; padding
    has zeros. Every token takes an eigenvalue problem of order 2 d + d_v (or D, for a whole layer)
    and one of order d_v.

    Args:
        att: the layer, samples x heads.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`.

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
    found = [_piece(part, map) for part in pieces(att, map)]
    sides = [
        beside(ends, att.samples, map, lambda several, dim: torch.cat(list(several), dim))
        for ends in zip(*found, strict=True)
    ]
    lower, upper, output_lower, output_upper = sides
    return TokenProfile(lower, upper, output_lower, output_upper, map)


@torch.no_grad()
def _piece(att: Attention, map: str) -> list[Tensor]:
    """Both ends of columns, then of rows."""
    measured = PreparedMap(att.double(), map)
    parts = parts_of(measured)
    shape = (att.samples, att.tokens) if map in WHOLE else (att.samples, att.heads, att.tokens)
    exponents = measured.exponents[:1] if map in WHOLE else measured.exponents.repeat(att.samples)
    real = (
        torch.ones(att.samples, att.tokens, dtype=torch.bool)
        if att.valid is None
        else att.valid.cpu()
    )
    real = real if map in WHOLE else real[:, None].expand(shape)
    ends: list[Tensor] = []
    for columns in (True, False):
        maps = []
        for which, rows in chunks(parts):
            part = parts.of_maps(which)
            maps.append(
                torch.cat([torch.stack(_norms(*_matrices(part, one, columns))) for one in rows], -1)
            )
        lower, upper = torch.cat(maps, 1).cpu()
        error = measured.roundoff.tensors.cpu()[:, None] * (1 + 1e-6)
        lower = torch.nan_to_num(lower - error, nan=0.0, posinf=0.0).clamp_min(0)
        upper = torch.nan_to_num(
            upper + error + parts.vanished.cpu()[:, None], nan=math.inf, posinf=math.inf
        )
        lower, upper = (
            times_power(lower, exponents[:, None]),
            times_power_up(upper, exponents[:, None]),
        )
        lower, upper = torch.where(lower < 1e-300, 0.0, lower).view(shape), upper.view(shape)
        if measured.known is not None:
            known = measured.known.cpu()[..., None].expand(shape)
            lower, upper = torch.where(known, lower, 0.0), torch.where(known, upper, math.inf)
        ends += [torch.where(real, lower, 0.0), torch.where(real, upper, 0.0)]
    return ends


def _matrices(parts: LayerTensors, rows: slice, columns: bool) -> tuple[Tensor, Tensor]:
    """Of columns of blocks, or of rows, of some tokens, with bounds on their rounding."""
    if columns:
        return parts.columns(rows)
    blocks = parts.rows(rows)
    return blocks.matrix(torch.ones_like(blocks.size))


def _norms(g: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of the roots of the largest eigenvalues of positive semi-definite matrices (b, i,
    n, n), whose errors are at most ``slack``."""
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
    return (rayleigh - slack).clamp_min(0).sqrt() * (1 - 1e-15), (upper + slack).sqrt() * (
        1 + 1e-15
    )
