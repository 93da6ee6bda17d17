"""Exact local Lipschitz constants where every token moves a little, or one token a lot, and where the worst output token counts."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from lipbound.attention.layer import Attention
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, check_layer, choice, flag, real
from lipbound.jacobians.maps import BLOCKS, MAPS, WHOLE
from lipbound.jacobians.spectral_norm import Measured, heads_of, shaped
from lipbound.jacobians.tokens.every_to_all import every_to_all
from lipbound.jacobians.tokens.parts import Parts
from lipbound.jacobians.tokens.search import Found, largest, largest_pair, steepest
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.solution import Norm

T = TypeVar("T")
PERTURBED = {
    "every": "every token moves, each by a vector of length at most one",
    "one": "one token moves, by a vector of length at most one",
    "all": "all tokens move together, by a perturbation of Frobenius norm at most one",
}
OUTPUT = {"worst": "length of the output token that moves most", "all": "Frobenius norm of the change of all output tokens"}
TOKEN_MAPS = tuple(name for name in MAPS if name not in BLOCKS)
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**31}
"""What the blocks of the rows that are worked on at a time may take."""
MATRIX_BYTES = {"cpu": 2**28, "cuda": 2**33}
"""What the attention matrices of the heads that are worked on at a time may take."""


@in_own_modes
def token_norm(
    att: Attention,
    perturbed: str = "every",
    output: str = "worst",
    *,
    map: str = "head",
    tol: float = 1e-3,
    vectors: bool = False,
    delta: float = 1e-10,
) -> Norm:
    r"""Exact norm of the Jacobian of every head at every input, with tokens told apart on either side.

    For blocks :math:`J_{ij}` from token j to output token i:

    ========= ========= ================================================================
    perturbed output    norm
    ========= ========= ================================================================
    "every"   "worst"   :math:`\max_i \sup_{|y|=1} \sum_j |J_{ij}^T y|`
    "one"     "all"     :math:`\max_j \|J_{:j}\|`, of columns of blocks
    "one"     "worst"   :math:`\max_{ij} \|J_{ij}\|`
    "all"     "worst"   :math:`\max_i \|J_{i:}\|`, of rows of blocks
    "every"   "all"     :math:`\sup_{\|Y\|_F=1} \sum_j |J_{:j}^T Y|`, a bracket
    ========= ========= ================================================================

    Lemmas 89, 90, 91 and 92 (docs/theory/token_norms.md). Both ends are deterministic and hold for the numbers given, every rounding included;
    nothing is drawn at random. ("every", "all") alone is another matter: it is hard to compute in general, so that its ends need not meet (they are
    at most 1.26 times apart where the search of both succeeds), it takes about ten times as long, and its upper end holds but for an event of
    probability ``delta``: Lemma 103 (docs/theory/token_bounds.md).

    Args:
        att: the layer, samples x heads.
        perturbed: "every" (token up to length one), "one" (a single token, or in sum of lengths) or "all" (by the Frobenius norm).
        output: "worst" (the output token that moves most) or "all" (Frobenius norm).
        map: "head", "head_out", "heads" or "layer", as of `lipbound.spectral_norm`. Matrices of whole layers are as wide as all heads together: for
            wide ones "every" and "one" to "all" take many times as long as all heads one by one.
        tol: relative width of the enclosure at which the search stops. "every" to "worst" is closed by convex minimisation and by cutting the sphere
            of output directions, which may leave a gap where many of them tie; the others close to rounding.
        vectors: also return which output token is hit, and by which perturbation.
        delta: total failure probability of the upper ends of ("every", "all"), as of `lipbound.spectral_norm`; nothing else depends on it.

    Returns:
        `Norm` with fields (samples, heads), or (samples,) for maps of the whole layer, float64; ``steps`` are of the search, ``error`` is
        ``upper / lower - 1``. With ``vectors``, ``right`` is a perturbation that attains ``lower``: its tokens have length one each (or zero) for
        "every", one of them has for "one", and the whole has for "all"; ``left`` is the unit output direction, at one token for "worst". Shapes as
        of `lipbound.spectral_norm`, dtype that of ``att``.

    Raises:
        LipboundError: unknown names, a tolerance that is no positive number, a probability outside (0, 1), a map without its output projection, and
            the pair ("all", "all"), which is `lipbound.spectral_norm`.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> att = Attention(*(torch.randn(s, generator=g, dtype=torch.float64) for s in [(1, 6, 8), (2, 8, 4), (2, 8, 4), (2, 8, 4)]))
    >>> norm = token_norm(att)
    >>> bool((norm.upper <= norm.lower * 1.001).all())
    True
    """
    check(att, "token_norm", perturbed, output, map)
    real("tol", tol, "a number > 0", above=0)
    real("delta", delta, "between 0 and 1, a probability of failure", above=0, below=1)
    vectors, tol = flag("vectors", vectors), float(tol)
    if (perturbed, output) == ("every", "all"):
        each = float(delta) / (att.samples if map in WHOLE else att.samples * att.heads)
        norms = [_bracket(part, map, tol, each, vectors) for part in pieces(att, map)]
    else:
        norms = [_piece(part, perturbed, output, map, tol, vectors) for part in pieces(att, map)]
    return beside(norms, att.samples, map, Norm.cat)


def check(att: object, what: str, perturbed: str, output: str, map: str) -> None:
    """Raise LipboundError for what cannot be measured; ``what`` measures."""
    choice("perturbed", perturbed, tuple(PERTURBED))
    choice("output", output, tuple(OUTPUT))
    choice("map", map, TOKEN_MAPS)
    check_layer(att, what)
    if (perturbed, output) == ("all", "all"):
        raise LipboundError("perturbed='all' with output='all' is the spectral norm; use lipbound.spectral_norm, with delta for an upper end")


def pieces(att: Attention, map: str) -> Iterator[Attention]:
    """Parts of a layer whose attention matrices fit, sample by sample."""
    together = att.heads
    if map not in WHOLE:
        together = max(1, int(MATRIX_BYTES.get(att.device.type, MATRIX_BYTES["cpu"]) // (64 * att.tokens**2)))
    for sample in range(att.samples):
        one = att.of_samples(slice(sample, sample + 1)) if att.samples > 1 else att
        for head in range(0, att.heads, together):
            yield one if together >= att.heads else one.select(heads=slice(head, head + together))


def beside(found: Sequence[T], samples: int, map: str, cat: Callable[[Sequence[T], int], T]) -> T:
    """What was found in all `pieces` of a layer, heads side by side and then samples."""
    per = 1 if map in WHOLE else len(found) // samples
    return cat([cat(found[i : i + per], 1) if per > 1 else found[i] for i in range(0, len(found), per)], 0)


def parts_of(measured: Measured) -> Parts:
    """What the blocks of a measured layer are made of."""
    whole = measured.map in WHOLE
    return Parts.of(measured.attention, heads_of(measured.op), together=whole, project=measured.map == "layer")


def chunks(parts: Parts) -> Iterator[tuple[slice, list[slice]]]:
    """Maps whose blocks are worked on together, and tokens among them, so many that they fit."""
    budget = CHUNK_BYTES.get(parts.p.device.type, CHUNK_BYTES["cpu"]) // parts.row_bytes
    step, maps = max(1, min(parts.tokens, budget)), max(1, budget // parts.tokens)
    rows = [slice(i, min(i + step, parts.tokens)) for i in range(0, parts.tokens, step)]
    return ((slice(b, b + maps), rows) for b in range(0, len(parts.p), maps))


@torch.no_grad()
def _piece(att: Attention, perturbed: str, output: str, map: str, tol: float, vectors: bool) -> Norm:
    """Norms of a part of a layer."""
    measured = Measured(att.double(), map)
    parts = parts_of(measured)
    found = [_found(parts.of_maps(maps), rows, perturbed, output, tol) for maps, rows in chunks(parts)]
    every = Found.cat(found)
    every = replace(every, upper=every.upper + parts.vanished)
    return shaped(att, _ends(measured, every, perturbed, output, tol, vectors), measured)


@torch.no_grad()
def _bracket(att: Attention, map: str, tol: float, delta: float, vectors: bool) -> Norm:
    """Ends of the norm from every token to all outputs of a part of a layer."""
    measured = Measured(att.double(), map)
    return shaped(att, every_to_all(measured, tol=tol, delta=delta, vectors=vectors), measured)


def _found(parts: Parts, chunks: list[slice], perturbed: str, output: str, tol: float) -> Found:
    """What is found in all tokens of some maps, some at a time; what is known of those before spares work on those after."""
    best: Found | None = None
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


def _placed(found: Found, rows: slice) -> Found:
    """With tokens counted from the first."""
    return replace(found, token=found.token + rows.start)


def _ends(measured: Measured, found: Found, perturbed: str, output: str, tol: float, vectors: bool) -> Norm:
    """What one product with J, or J^T, shows of the vectors that were found, and the bounds, with all rounding:
    Lemma 93 (docs/theory/token_norms.md)."""
    op, batch = measured.op, torch.arange(len(found.token), device=found.token.device)
    error, product = (t.to(found.value.device) for t in (measured.roundoff.tensors, measured.roundoff.products))
    unit = found.vector / torch.linalg.vector_norm(found.vector, dim=-1, keepdim=True).clamp_min(1e-300)
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
            right[batch, found.source] = pulled[batch, found.source] / reached.clamp_min(1e-300)[:, None]
    sums = 2 * (sum(op.in_shape) + math.prod(op.out_shape) + 16) * UNIT
    lower = torch.nan_to_num(reached * (1 - sums) - root * (product + error) * (1 + 1e-6), nan=0.0, posinf=0.0).clamp_min(0)
    upper = torch.nan_to_num(found.upper * (1 + 1e-13) + root * error * (1 + 1e-6), nan=math.inf, posinf=math.inf)
    lower, upper, steps = (t.cpu() for t in (lower, upper, found.steps))
    wide = torch.where(lower > 0, upper / lower.clamp_min(1e-300) - 1, torch.where(upper == 0, 0.0, math.inf))
    return Norm(lower, upper, steps, wide <= tol, wide, left if vectors else None, right if vectors else None)
