r"""Compression of the blocks of J, and of those of :math:`J J^T`, to the matrix of their norms: costlier and sharper than
`lipbound.bounds.lipbound2026.plain`."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants import VARIANTS
from lipbound.bounds import ingredients as qty
from lipbound.bounds.entry import Bound
from lipbound.bounds.lipbound2026 import BIBTEX, CITATION
from lipbound.bounds.lipbound2026.parts import samples_of
from lipbound.bounds.lipbound2026.plain import lipbound_block
from lipbound.bounds.multihead import with_folded
from lipbound.bounds.registry import bound
from lipbound.devices import require
from lipbound.jacobians.gram import Gram
from lipbound.jacobians.gram_variants import gram_of
from lipbound.linalg.matrix_norms import SMALLEST, block_norm, nonnegative_norm, power_of_two, reproducible_float32

SQUARE = 8192
"""Largest order of a G that is squared."""
COPIES = 8
"""How many N x N matrices are in memory together, besides P of all heads and its scores."""
LOOSE = 1.1
"""How far above a lower estimate a bound must be for that."""


def compressed_norm(gram: Gram) -> float:
    r"""Lemma 17 (docs/theory/bounds.md) for any stacking of heads: :math:`\|J\| \le \|[\|G_{ik}\|]_{ik}\|^{1/2}`, rounding of G included.

    Where that is more than 10 % above a lower estimate (20 power steps), and G is of order 8192 at most, the blocks of :math:`G^2` are compressed
    too: :math:`\|J\| = \|G^2\|^{1/4}`. The lower estimate decides on effort alone.
    """
    sizes, n, order = torch.zeros(gram.tokens, gram.tokens, dtype=torch.float64, device=gram.device), gram.tokens, gram.tokens * gram.width
    whole: Tensor | None = None
    for rows, cols, tile in gram.tiles():
        _put(sizes, rows, cols, block_norm(tile.transpose(1, 2)))
        if len(tile) == n:  # all of G is there
            whole = tile.reshape(order, order)
    top = float(nonnegative_norm(sizes))
    if top > 0 and order <= SQUARE and top > LOOSE**2 * _rayleigh(gram, whole):
        top = min(top, float(sizes.max()) * _squared(gram, float(sizes.max())) ** 0.5)
    return float((top + gram.error * (1 + 1e-9)) ** 0.5 * (1 + 1e-12))


def _put(sizes: Tensor, rows: slice, cols: slice, norms: Tensor) -> None:
    """Write norms of blocks of a symmetric matrix, on both sides of the diagonal."""
    sizes[rows, cols] = norms
    sizes[cols, rows] = norms.mT


def _rayleigh(gram: Gram, whole: Tensor | None) -> float:
    """A value that G reaches: power iteration from a fixed start, with G itself, (N width, N width), where it is there."""
    y = torch.randn(gram.tokens, gram.width, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(gram.device)
    for _ in range(20):
        y = y / y.norm()
        y = gram.apply(y) if whole is None else (whole @ y.view(-1, 1)).view_as(y)
    return float(y.norm())


def _squared(gram: Gram, size: float) -> float:
    r"""Upper value of :math:`\|G^2\| / s^2` by the norms of the blocks of the square, multiplied in float32 where that is what the device does.

    The rounding of the product is added to each block's norm: Lemma 56 (docs/theory/numerics.md).
    """
    n, w = gram.tokens, gram.width
    work = torch.float32 if reproducible_float32() else torch.float64
    g = torch.empty(n, w, n, w, dtype=work, device=gram.device)
    lengths = torch.zeros(n, n, dtype=torch.float64, device=gram.device)
    for rows, cols, tile in gram.tiles():
        tile = tile / size
        g[rows, :, cols] = tile.to(work)
        g[cols, :, rows] = tile.permute(2, 3, 0, 1).to(work)
        _put(lengths, rows, cols, tile.square().sum((1, 3)).sqrt())
    norms = torch.zeros_like(lengths)
    step = max(1, 512 // w)
    for i in range(0, n, step):
        rows, cols = slice(i, min(i + step, n)), slice(i, n)
        stripe = g[rows].reshape(-1, n * w) @ g[:, :, cols].reshape(n * w, -1)
        _put(norms, rows, cols, block_norm(stripe.view(-1, w, n - i, w).transpose(1, 2)))
    unit = torch.finfo(work).eps / 2
    slack = (n * w + 4) * unit / (1 - (n * w + 4) * unit)
    return float(nonnegative_norm(norms + slack * (lengths @ lengths) * (1 + 1e-9) + 1e-36))


def _check(att: Attention) -> None:
    """Raise LipboundError where memory for P of all heads, and for matrices of norms, is not free."""
    what = f"lipbound_gram at {att.tokens} tokens needs matrices over all their pairs"
    require((COPIES + 2 * att.heads * att.samples) * 8.0 * att.tokens**2, att.device, what, "measure shorter inputs, or name 'lipbound'")


def _whole(bound: Bound, att: Attention, map: str) -> Tensor:
    """The blocks of the layer's own J J^T, (samples,), with what rounding has left in its tensors: errors of heads add up, times ||W_O^h||.

    Where sizes are not ordinary, the bounds on heads are combined.
    """
    _check(att)
    everything, values = list(range(att.heads)), []
    with torch.no_grad():
        for sample in samples_of(att):
            one = sample.layer
            if bool((sample.exponents != 0).any() | ~sample.exact.all()):
                return with_folded(bound, att, map)
            unit, w_o = torch.ones((), dtype=torch.float64, device=att.device), None
            error = torch.ones(att.heads, dtype=torch.float64, device=att.device)
            if map == "layer":
                assert one.w_o is not None
                unit = power_of_two(one.w_o.abs().amax())
                w_o = one.w_o / unit
                error = torch.linalg.matrix_norm(w_o)
            zero = torch.zeros(att.heads, dtype=torch.float64, device=att.device)
            error = (sample.finished(zero) * error).sum() * (1 + 1e-9)
            values.append((compressed_norm(Gram(one, 0, everything, w_o)) + error) * unit)
    total = torch.stack(values)
    return torch.where(total.isnan(), torch.inf, total)


@bound(
    "lipbound_gram",
    label="lipbound, blocks of JJ^T",
    citation=CITATION,
    bibtex=BIBTEX,
    statement="||J||^2 <= ||[ ||G_ik|| ]_ik||, G_ik = sum_j J_ij J_kj^T blocks of J J^T by token pairs; the same of G^2 where that is loose",
    source="lipbound.bounds.lipbound2026.gram",
    assumptions="any biases, any mask",
    condition=qty.always,
    cost="O(N^3 d_v^2), O(N^3 d_v^3) where it squares",
    costly=True,
    differentiable=False,
    layer=_whole,
)
def lipbound_gram(att: Attention) -> Tensor:
    r"""Gram compression: within about 5 % of the exact norm on pretrained heads. Deterministic, in float64.

    .. math:: \|J\| \le \big\|\,[\|G_{ik}\|]_{ik}\,\big\|^{1/2},\quad G = J J^T

    A block matrix is no larger in norm than the matrix of its blocks' norms: Lemma 17 (docs/theory/bounds.md). It is never above the compression of J
    itself. The same holds for :math:`G^2`, whose compression is never above the square of that of G.

    The square is formed only for heads where G's own compression is more than 10 % above a power estimate, and while N d_v is at most 8192.

    The blocks come from their closed form (`lipbound.jacobians.gram`; `lipbound.jacobians.gram_variants` with rotary position embeddings, normalised
    queries and keys, capped scores or sinks), tile by tile, and the rounding error of G is added. Norms of blocks are upper values
    (`lipbound.linalg.matrix_norms.block_norm`). Where J J^T leaves the range of float64, which probabilities next to a sink can bring about, the
    value is that of ``lipbound_block``. Raises LipboundError, before it starts, where memory for N x N matrices is not free.
    With a ``w_o`` per head folded into the values this bounds "head_out"; for whole layers see
    `lipbound.bounds.whole_layer`.
    """
    return _heads(att)


@lipbound_gram.extends(*VARIANTS, condition=qty.always, layer=with_folded)
def _heads(att: Attention) -> Tensor:
    """Head by head, of any kind: `gram_of` has the closed form of each."""
    _check(att)
    rows = []
    with torch.no_grad():
        for s, sample in enumerate(samples_of(att)):
            values = torch.tensor([compressed_norm(gram_of(sample.layer, 0, [h])) for h in range(att.heads)], dtype=torch.float64, device=att.device)
            row = sample.finished(values)
            rows.append(torch.where(values < SMALLEST, lipbound_block(att)[s], row) if bool((values < SMALLEST).any()) else row)
    return torch.stack(rows)
