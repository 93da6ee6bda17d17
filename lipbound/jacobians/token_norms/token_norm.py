"""Exact local Lipschitz constants where every token moves a little, or one token a lot, and where
the worst output token counts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes
from lipbound.errors import check_layer, choice, flag, real
from lipbound.jacobians.maps import BLOCKS, MAPS, WHOLE
from lipbound.jacobians.prepared_map import PreparedMap, heads_of
from lipbound.jacobians.spectral_norm import shaped
from lipbound.jacobians.token_norms.layer_tensors import LayerTensors
from lipbound.jacobians.token_norms.row_search import BestRows, largest, largest_pair, steepest
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.solution import Norm

T = TypeVar("T")
NORMS = {
    "every-token": ("every", "worst"),
    "one-token": ("one", "all"),
    "token-pair": ("one", "worst"),
    "output-token": ("all", "worst"),
}
"""Norms that tell tokens apart: which tokens move, and which output tokens count."""
TOKEN_MAPS = tuple(name for name in MAPS if name not in BLOCKS)
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}
"""What the blocks of the rows that are worked on at a time may take."""
MATRIX_BYTES = {"cpu": 2**28, "cuda": 2**33}
"""What the attention matrices of the heads that are worked on at a time may take."""


@in_own_modes
def token_norm(
    att: Attention,
    norm: str = "every-token",
    *,
    map: str = "head",
    tol: float = 1e-3,
    vectors: bool = False,
) -> Norm:
    r"""Exact norm of the Jacobian of every head at every input, with tokens told apart.

    For blocks :math:`J_{ij}` from token j to output token i:

    ============== ====================== =============
    ================================================== norm what moves what counts value
    ============== ====================== =============
    ================================================== "every-token" every token, each by the output
    :math:`\max_i \sup_{|y|=1} \sum_j |J_{ij}^T y|`
                   at most one            token that
                                          moves most
    "one-token" one token all output :math:`\max_j \|J_{:j}\|`, of columns of blocks tokens
    "token-pair"   one token              the worst     :math:`\max_{ij} \|J_{ij}\|`
                                          output token
    "output-token" all tokens, by one in  the worst     :math:`\max_i \|J_{i:}\|`, of rows of blocks
                   the Frobenius norm     output token
    ============== ====================== =============
    ==================================================

    Lemmas 89, 90, 91 and 92 (docs/theory/token_norms.md). Both ends are deterministic and hold for
    the numbers given, every rounding included; nothing is drawn at random.

    Args:
        att: the layer, samples x heads.
        norm: one of the names above; `lipbound.compare` knows the first two.
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`. Matrices of
            whole layers are as wide as all heads together: for wide ones the first two norms take
            many times as long as all heads one by one.
        tol: relative width of the enclosure at which the search stops, 1e-3 as in
            `lipbound.compare`. "every-token" is closed by convex minimisation and by cutting the
            sphere of output directions, which may leave a gap where many of them tie; the others
            close to rounding.
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
    choice("norm", norm, tuple(NORMS))
    check(att, "token_norm", map)
    real("tol", tol, "a number > 0", above=0)
    vectors, tol = flag("vectors", vectors), float(tol)
    norms = [_piece(part, *NORMS[norm], map, tol, vectors) for part in pieces(att, map)]
    return beside(norms, att.samples, map, Norm.cat)


def check(att: object, what: str, map: str) -> None:
    """Raise LipboundError for what cannot be measured; ``what`` measures."""
    choice("map", map, TOKEN_MAPS)
    check_layer(att, what)


def pieces(att: Attention, map: str) -> Iterator[Attention]:
    """Parts of a layer whose attention matrices fit, sample by sample."""
    together = att.heads
    if map not in WHOLE:
        together = max(
            1, int(MATRIX_BYTES.get(att.device.type, MATRIX_BYTES["cpu"]) // (64 * att.tokens**2))
        )
    for sample in range(att.samples):
        one = att.of_samples(slice(sample, sample + 1)) if att.samples > 1 else att
        for head in range(0, att.heads, together):
            yield one if together >= att.heads else one.select(heads=slice(head, head + together))


def beside(found: Sequence[T], samples: int, map: str, cat: Callable[[Sequence[T], int], T]) -> T:
    """What was found in all `pieces` of a layer, heads side by side and then samples."""
    per = 1 if map in WHOLE else len(found) // samples
    return cat(
        [cat(found[i : i + per], 1) if per > 1 else found[i] for i in range(0, len(found), per)], 0
    )


def parts_of(measured: PreparedMap) -> LayerTensors:
    """What the blocks of a measured layer are made of."""
    whole = measured.map in WHOLE
    return LayerTensors.of(
        measured.attention, heads_of(measured.op), together=whole, project=measured.map == "layer"
    )


def chunks(parts: LayerTensors) -> Iterator[tuple[slice, list[slice]]]:
    """Maps whose blocks are worked on together, and tokens among them, so many that they fit."""
    budget = CHUNK_BYTES.get(parts.p.device.type, CHUNK_BYTES["cpu"]) // parts.row_bytes
    step, maps = max(1, min(parts.tokens, budget)), max(1, budget // parts.tokens)
    rows = [slice(i, min(i + step, parts.tokens)) for i in range(0, parts.tokens, step)]
    return ((slice(b, b + maps), rows) for b in range(0, len(parts.p), maps))


@torch.no_grad()
def _piece(
    att: Attention, perturbed: str, output: str, map: str, tol: float, vectors: bool
) -> Norm:
    """Norms of a part of a layer."""
    measured = PreparedMap(att.double(), map)
    parts = parts_of(measured)
    found = [
        _found(parts.of_maps(maps), rows, perturbed, output, tol) for maps, rows in chunks(parts)
    ]
    every = BestRows.cat(found)
    every = replace(every, upper=every.upper + parts.vanished)
    return shaped(att, _ends(measured, every, perturbed, output, tol, vectors), measured)


def _found(
    parts: LayerTensors, chunks: list[slice], perturbed: str, output: str, tol: float
) -> BestRows:
    """What is found in all tokens of some maps, some at a time; what is known of those before
    spares work on those after."""
    best: BestRows | None = None
    for rows in chunks:
        if (perturbed, output) == ("one", "all"):
            one = _placed(largest(*parts.columns(rows), tol / 4), rows)
        elif perturbed == "one":
            one = largest_pair(parts.rows(rows), tol)
        elif perturbed == "all":
            blocks = parts.rows(rows)
            one = _placed(largest(*blocks.matrix(torch.ones_like(blocks.size)), tol / 4), rows)
        else:
            one = steepest(parts.rows(rows), tol, None if best is None else best.value)
        best = one if best is None else best.joined(one)
    assert best is not None
    return best


def _placed(found: BestRows, rows: slice) -> BestRows:
    """With tokens counted from the first."""
    return replace(found, token=found.token + rows.start)


def _ends(
    measured: PreparedMap, found: BestRows, perturbed: str, output: str, tol: float, vectors: bool
) -> Norm:
    """What one product with J, or J^T, shows of the vectors that were found, and the bounds, with
    all rounding: Lemma 93 (docs/theory/token_norms.md)."""
    op, batch = measured.op, torch.arange(len(found.token), device=found.token.device)
    error, product = (
        t.to(found.value.device) for t in (measured.roundoff.tensors, measured.roundoff.products)
    )
    unit = found.vector / torch.linalg.vector_norm(found.vector, dim=-1, keepdim=True).clamp_min(
        1e-300
    )
    root = op.in_shape[0] ** 0.5 if perturbed == "every" else 1.0
    if (perturbed, output) == ("one", "all"):
        right = torch.zeros(op.batch, *op.in_shape, dtype=torch.float64, device=unit.device)
        right[batch, found.token] = unit
        left = op.jvp(right)
        reached = torch.linalg.vector_norm(left, dim=(1, 2))
        left = left / reached.clamp_min(1e-300)[:, None, None]
    else:
        left = torch.zeros(op.batch, *op.out_shape, dtype=torch.float64, device=unit.device)
        left[batch, found.token] = unit
        pulled = op.vjp(left)
        lengths = torch.linalg.vector_norm(pulled, dim=-1)
        if perturbed == "every":
            reached, right = lengths.sum(-1), pulled / lengths.clamp_min(1e-300)[..., None]
        elif perturbed == "all":
            reached = torch.linalg.vector_norm(lengths, dim=-1)
            right = pulled / reached.clamp_min(1e-300)[:, None, None]
        else:
            reached = lengths[batch, found.source]
            right = torch.zeros_like(pulled)
            right[batch, found.source] = (
                pulled[batch, found.source] / reached.clamp_min(1e-300)[:, None]
            )
    sums = 2 * (sum(op.in_shape) + math.prod(op.out_shape) + 16) * UNIT
    lower = torch.nan_to_num(
        reached * (1 - sums) - root * (product + error) * (1 + 1e-6), nan=0.0, posinf=0.0
    ).clamp_min(0)
    upper = torch.nan_to_num(
        found.upper * (1 + 1e-13) + root * error * (1 + 1e-6), nan=math.inf, posinf=math.inf
    )
    lower, upper, steps = (t.cpu() for t in (lower, upper, found.steps))
    wide = torch.where(
        lower > 0, upper / lower.clamp_min(1e-300) - 1, torch.where(upper == 0, 0.0, math.inf)
    )
    return Norm(
        lower,
        upper,
        steps,
        wide <= tol,
        wide,
        left if vectors else None,
        right if vectors else None,
    )
