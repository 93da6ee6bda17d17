"""Exact local Lipschitz constants in norms that tell tokens apart.

Every token moves a little, or one token a lot, and the worst output token counts, or all of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import WITH_TOKEN_NORMS
from lipbound.devices import in_own_modes
from lipbound.errors import T, check_layer, choice, flag, real
from lipbound.formatting import TABLE_ROWS, html_table, number
from lipbound.jacobians.in_range import InRange, MapOperator, in_range
from lipbound.jacobians.maps import BLOCKS, MAPS, WHOLE, LayerJacobian
from lipbound.jacobians.token_norms.blocks import LayerTensors
from lipbound.jacobians.token_norms.row_search import BestRows, best_rows, roots
from lipbound.linalg.matrix_norms import UNIT, times_power, times_power_up
from lipbound.linalg.operators import Roundoff
from lipbound.linalg.solution import Norm

BLOCK_NORMS = ("every-token", "one-token", "token-pair", "output-token")
"""Norms that tell tokens apart."""
TOKEN_MAPS = tuple(name for name in MAPS if name not in BLOCKS)
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}
"""Bytes that the blocks of the rows that are worked on at a time may take."""
MATRIX_BYTES = {"cpu": 2**28, "cuda": 2**33}
"""Bytes that attention matrices of heads that are worked on at a time may take."""


@in_own_modes
def token_norm(
    att: Attention,
    norm: str = "every-token",
    *,
    map: str = "head",
    tol: float = 1e-4,
    vectors: bool = False,
) -> Norm:
    r"""Exact norm of the Jacobian of every head at every input, with tokens told apart.

    For blocks :math:`J_{ij}` from token j to output token i:

    ============== ========================================= ======================================
    norm           what moves, and what counts               value
    ============== ========================================= ======================================
    "every-token"  every token, each by at most one; the     :math:`\max_i \sup_{|y|=1} \sum_j
                   output token that moves most              |J_{ij}^T y|`
    "one-token"    one token, by one; all output tokens      :math:`\max_j \|J_{:j}\|`
    "token-pair"   one token, by one; the worst output token :math:`\max_{ij} \|J_{ij}\|`
    "output-token" all tokens, by one in the Frobenius norm; :math:`\max_i \|J_{i:}\|`
                   the worst output token
    ============== ========================================= ======================================

    Lemmas 89, 90 and 92 (docs/theory/token_norms.md). Both ends are deterministic and hold for
    the numbers given, every rounding included; nothing is drawn at random.

    Args:
        att: the layer, samples x heads.
        norm: one of the names above; `lipbound.compare` knows the first two.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`. Matrices of
            whole layers are as wide as all heads together: for wide ones the first two norms take
            many times as long as all heads one by one.
        tol: relative width of the enclosure at which the search stops. "every-token" is closed by
            convex minimisation, which may leave a gap where many output directions tie: below 1 %
            on pretrained heads, and ``error`` says how wide; the others close to rounding.
        vectors: also return which output token is hit, and by which perturbation.

    Returns:
        `Norm` with fields (samples, heads), or (samples,) for maps of the whole layer, float64;
        ``steps`` are of the search, ``error`` is ``upper / lower - 1``. With ``vectors``, ``right``
        is a perturbation that attains ``lower``: its tokens have length one each (or zero) for
        "every-token", a single one has in the next two, and the whole has for "output-token";
        ``left`` is the unit output direction, at one token but for "one-token". Shapes as of
        `lipbound.spectral_norm`, dtype that of ``att``.

    Raises:
        LipboundError: unknown names, a tolerance that is no positive number, a map without its
            output projection.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g).double() for shape in shapes))
    >>> norm = token_norm(att)
    >>> bool((norm.upper <= norm.lower * 1.001).all())
    True
    """
    choice("norm", norm, BLOCK_NORMS)
    check(att, "token_norm", map)
    real("tol", tol, "a number > 0", above=0)
    vectors, tol = flag("vectors", vectors), float(tol)
    norms = [_norms(part, norm, map, tol, vectors) for part in pieces(att, map)]
    return beside(norms, att.samples, map, Norm.cat)


def check(att: Attention, what: str, map: str) -> None:
    """Raise LipboundError for what cannot be measured; ``what`` measures."""
    choice("map", map, TOKEN_MAPS)
    check_layer(att, what)
    att.only(what, WITH_TOKEN_NORMS)


def pieces(att: Attention, map: str) -> Iterator[Attention]:
    """Parts of a layer whose attention matrices fit, sample by sample."""
    together = att.heads
    if map not in WHOLE:
        budget = MATRIX_BYTES.get(att.device.type, MATRIX_BYTES["cpu"])
        together = max(1, int(budget // (64 * att.tokens**2)))
    for sample in range(att.samples):
        one = att.of_samples(slice(sample, sample + 1)) if att.samples > 1 else att
        for head in range(0, att.heads, together):
            yield one if together >= att.heads else one.select(heads=slice(head, head + together))


def beside(found: Sequence[T], samples: int, map: str, cat: Callable[[Sequence[T], int], T]) -> T:
    """Join what was found in all `pieces` of a layer, heads side by side and then samples."""
    per = 1 if map in WHOLE else len(found) // samples
    each = [found[i : i + per] for i in range(0, len(found), per)]
    return cat([cat(one, 1) if per > 1 else one[0] for one in each], 0)


def tensors_of(wide: InRange, op: MapOperator) -> LayerTensors:
    """Tensors of the blocks of a layer and its Jacobian."""
    heads = op.heads if isinstance(op, LayerJacobian) else op
    return LayerTensors.of(wide.layer, heads, together=op is not heads, project=wide.map == "layer")


def chunks(parts: LayerTensors) -> Iterator[tuple[slice, list[slice]]]:
    """Maps whose blocks are worked on together, and tokens among them, so many that they fit."""
    budget = CHUNK_BYTES.get(parts.p.device.type, CHUNK_BYTES["cpu"]) // parts.row_bytes
    step, maps = max(1, min(parts.tokens, budget)), max(1, budget // parts.tokens)
    rows = [slice(i, min(i + step, parts.tokens)) for i in range(0, parts.tokens, step)]
    return ((slice(b, b + maps), rows) for b in range(0, len(parts.p), maps))


@torch.no_grad()
def _norms(att: Attention, norm: str, map: str, tol: float, vectors: bool) -> Norm:
    """Norms of one of the `pieces` of a layer."""
    wide = in_range(att.double(), map)
    op = wide.jacobian()
    parts = tensors_of(wide, op)
    every = BestRows.cat([best_rows(parts.of_maps(m), r, norm, tol) for m, r in chunks(parts)])
    every = every._replace(upper=every.upper + parts.vanished)
    found = _ends(op, wide.allowance(op), every, norm, tol, vectors=vectors)
    return wide.brought_back(found, op, att.dtype)


def _ends(
    op: MapOperator, roundoff: Roundoff, found: BestRows, norm: str, tol: float, *, vectors: bool
) -> Norm:
    """Both ends, with all rounding, from one product with J or J^T and the vectors that were found.

    Lemma 93 (docs/theory/token_norms.md).
    """
    batch = torch.arange(len(found.token), device=found.token.device)
    error, product = (t.to(found.value.device) for t in (roundoff.tensors, roundoff.products))
    root = op.in_shape[0] ** 0.5 if norm == "every-token" else 1.0
    shape = op.in_shape if norm == "one-token" else op.out_shape
    left = torch.zeros(op.batch, *shape, dtype=torch.float64, device=batch.device)
    left[batch, found.token] = _unit(found.vector, -1)
    right = op.jvp(left) if norm == "one-token" else op.vjp(left)
    if norm == "token-pair":
        alone = torch.zeros_like(right)
        alone[batch, found.source] = right[batch, found.source]
        right = alone
    lengths = torch.linalg.vector_norm(right, dim=-1)
    if norm == "every-token":
        reached, right = lengths.sum(-1), _unit(right, -1)
    else:
        reached, right = torch.linalg.vector_norm(lengths, dim=-1), _unit(right, (1, 2))
    left, right = (right, left) if norm == "one-token" else (left, right)
    sums = 2 * (sum(op.in_shape) + math.prod(op.out_shape) + 16) * UNIT
    lower = reached * (1 - sums) - root * (product + error) * (1 + 1e-6)
    lower = torch.nan_to_num(lower, nan=0.0, posinf=0.0).clamp_min(0).cpu()
    upper = found.upper * (1 + 1e-13) + root * error * (1 + 1e-6)
    upper = torch.nan_to_num(upper, nan=math.inf, posinf=math.inf).cpu()
    nothing = torch.where(upper == 0, 0.0, math.inf)
    wide = torch.where(lower > 0, upper / lower.clamp_min(1e-300) - 1, nothing)
    pair = (left, right) if vectors else (None, None)
    return Norm(lower, upper, found.steps.cpu(), wide <= tol, wide, *pair)


def _unit(t: Tensor, dim: int | tuple[int, int]) -> Tensor:
    return t / torch.linalg.vector_norm(t, dim=dim, keepdim=True).clamp_min(1e-300)


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
        n = self.lower.shape[-1]
        ends = (self.lower, self.upper, self.output_lower, self.output_upper)
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
    found = [_profile(part, map) for part in pieces(att, map)]
    ends = beside(found, att.samples, map, lambda several, dim: torch.cat(list(several), dim))
    lower, upper, output_lower, output_upper = ends.unbind(-1)
    return TokenProfile(lower, upper, output_lower, output_upper, map)


@torch.no_grad()
def _profile(att: Attention, map: str) -> Tensor:
    """Both ends of columns, then of rows, of one of the `pieces` of a layer.

    (1, heads, N, 4), or (1, N, 4) for a whole layer.
    """
    wide = in_range(att.double(), map)
    op, exponents = wide.jacobian(), wide.exponents[:, None]
    parts, ends = tensors_of(wide, op), []
    error = wide.allowance(op).tensors[:, None] * (1 + 1e-6)
    for columns in (True, False):
        found = []
        for maps, rows in chunks(parts):
            some = [roots(*parts.of_maps(maps).squares(r, columns=columns))[:2] for r in rows]
            found.append(torch.cat([torch.stack(both) for both in some], -1))
        lower, upper = torch.cat(found, 1).cpu()
        lower = torch.nan_to_num(lower - error, nan=0.0, posinf=0.0).clamp_min(0)
        upper = upper + error + parts.vanished.cpu()[:, None]
        upper = torch.nan_to_num(upper, nan=math.inf, posinf=math.inf)
        lower = times_power(lower, exponents)
        ends += [torch.where(lower < 1e-300, 0.0, lower), times_power_up(upper, exponents)]
    every = torch.stack(ends, -1)
    if att.valid is not None:
        every = every.masked_fill(~att.valid.cpu()[..., None], 0.0)
    return every if map in WHOLE else every[None]
