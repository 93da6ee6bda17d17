r"""`lipbound` and `lipbound_block` for plain heads at any length: matrices of norms of blocks are applied to vectors, and never there as a whole.

Up to 20,000 tokens `lipbound` has them in float32 (`lipbound.bounds.lipbound2026.streaming.tiled`). Proof: Lemmas 104 and 105
(docs/theory/long_inputs.md).
"""

from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors
from lipbound.bounds.lipbound2026.parts import MATRICES, Sample, samples_of
from lipbound.bounds.lipbound2026.pieces import root
from lipbound.bounds.lipbound2026.streaming.iteration import MAX_STEPS, least_norm
from lipbound.bounds.lipbound2026.streaming.parts import FORM_BYTES, LARGEST, TokenNorms
from lipbound.bounds.lipbound2026.streaming.rows import ROW_BYTES
from lipbound.bounds.lipbound2026.streaming.tiled import Tiled, numbers
from lipbound.devices import require
from lipbound.jacobians.rounding import distance
from lipbound.linalg.matrix_norms import matrix_norm

STORED = 4e9
"""Bytes of matrices over all pairs of tokens above which our bounds do without them."""
TILED = 1.6e9
"""Bytes of one float32 matrix over all pairs of tokens up to which `lipbound` has one: 20,000 tokens."""
TEMPORARIES = 12
"""How many blocks of rows are in memory together."""


def too_long(att: Attention) -> bool:
    """Whether matrices over all pairs of tokens of a layer would take more than `STORED`: a matter of its shape, and of no machine.

    Where derivatives are wanted they are stored whatever they take.
    """
    return (MATRICES + att.heads) * 8.0 * att.tokens**2 > STORED and not att.cache.recording


def tiled(att: Attention, kind: "type[Stacked] | type[Compressed]") -> bool:
    """Whether one float32 matrix over all pairs of tokens stands for those of `lipbound`: a matter of the layer's shape again."""
    return kind is Compressed and 4.0 * att.tokens**2 <= TILED


def memory(att: Attention, kind: "type[Stacked] | type[Compressed]") -> float:
    """Bytes that a bound takes without float64 matrices over all pairs of tokens, but for the layer's mask, if it has one."""
    d, forms = att.d, att.d * (att.d + 1) // 2
    forms = forms if 8 * att.tokens * forms <= FORM_BYTES else 0
    heads = att.samples * att.heads * (3 * d + 2 * att.d_v + 16) + 2 * att.samples * att.x.shape[2]
    tokens = 8.0 * att.tokens * (heads + forms + 4 * (d + att.d_v) + 8 * LARGEST + 4 * MAX_STEPS + 30)
    square = 4.0 * att.tokens**2 + 8.0 * numbers(att.tokens) if tiled(att, kind) else 0.0
    return tokens + square + TEMPORARIES * max(ROW_BYTES, 8 * att.tokens)


def streamed(att: Attention, kind: "type[Stacked] | type[Compressed]") -> Tensor:
    """A bound on every head of every sample, (samples, heads), as `lipbound.bounds.lipbound2026.parts.in_chunks` has it of whole matrices.

    Raises LipboundError where the memory for it is not free.
    """
    square = ", one of them in float32" if tiled(att, kind) else ""
    what = f"our bounds at {att.tokens} tokens keep numbers for every token and some rows of their matrices{square}"
    require(memory(att, kind), att.device, what, "measure shorter inputs or fewer samples, or name other bounds")
    found = []
    with torch.no_grad():
        for sample in samples_of(att):
            heads = [_one(sample, h, kind) for h in range(att.heads)]
            values, largest, away = (torch.stack(part) for part in zip(*heads, strict=True))
            found.append(sample.closed(values, largest, away))
    return torch.stack(found)


def _one(sample: Sample, head: int, kind: "type[Stacked] | type[Compressed]") -> tuple[Tensor, Tensor, Tensor]:
    """The bound on one head, the largest entry of P, and how far J may be from that of the stored tensors."""
    one = sample.layer
    parts = TokenNorms(one, head, sample.errors, gram=kind is Compressed)
    errors = TensorErrors(*(getattr(sample.errors, field.name)[0, head] for field in fields(sample.errors)))
    away = distance(errors, parts.moments, one.scale, parts.norm_v)
    return (Tiled if tiled(one, kind) else kind)(parts).value(), parts.largest, away


class Stacked:
    """The matrix of `lipbound_block`, of one head."""

    def __init__(self, parts: TokenNorms):
        self._parts = parts

    def value(self) -> Tensor:
        """Upper value of its norm, but for `positive_slack`."""
        return root(least_norm(self._apply, len(self._parts.v), self._parts.b.new_zeros(1)))

    def _apply(self, y: Tensor) -> Tensor:
        """B^T B y."""
        own, total = self._parts, torch.zeros_like(y)
        for rows, p in own.rows:
            sizes = p * own.distance(rows).mul_(own.qt_norm[rows, None]).add_(own.norm_v)
            image = sizes @ y + own.b[rows, None] * y[rows]
            total.addmm_(sizes.mT, image)
            total[rows] += own.b[rows, None] * image
        return total


class Compressed:
    """The two matrices of `lipbound`, of one head."""

    def __init__(self, parts: TokenNorms):
        self._parts = parts
        # Largest entries count one by one in rows where that is less, for a vector with equal entries, than what they add to the norm of A_i or P_i
        total = parts.a.sum()
        single = (parts.parts * parts.columns[parts.keys]).sum(-1) <= (parts.a - parts.rest) * total
        self._t, self._rest = parts.parts * single[:, None], torch.where(single, parts.rest, parts.a)
        self._single = single[:, None]
        single = (parts.shares * parts.columns[parts.p_keys]).sum(-1) <= (parts.p_norm - parts.p_rest) * total
        self._t_p, self._p_rest = parts.shares * single[:, None], torch.where(single, parts.p_rest, parts.p_norm)

    def value(self) -> Tensor:
        """Upper value of the bound, but for `positive_slack`."""
        parts = self._parts
        key = (matrix_norm(parts.a[:, None] * parts.qt) + (parts.a * parts.off_qt).norm()) ** 2
        return root(least_norm(self._apply, len(parts.v), torch.stack([torch.zeros_like(key), key])))

    def _apply(self, y: Tensor) -> Tensor:
        """(E + K) y_0 and E y_1."""
        own = self._parts
        z, rest, p_rest, b_v = (t[:, None] for t in (own.z, self._rest, self._p_rest, own.b_v))
        single, scaled = _push(self._t, own.keys, z * y), rest[:, 0] * y[:, 0]
        from_p = _push(self._t_p, own.p_keys, y)
        total = own.b[:, None] ** 2 * y + z * rest * (p_rest * y).sum(0) + p_rest * (rest * z * y).sum(0)
        seen, spread = torch.zeros_like(y), torch.zeros_like(y)
        for rows, p in own.rows:
            e = own.distance(rows).mul_(p)
            at, t, largest = own.keys[rows], self._t[rows], e.gather(1, own.keys[rows])
            seen.addmm_(p.mT, y[rows])
            total[rows] += p @ (b_v * y + single)

            through = own.through_queries(rows).mul_(e)
            total.addmm_(through.mT, y[rows])
            total[rows] += through @ y
            del through

            e.scatter_(1, at, torch.where(self._single[rows], 0.0, largest))
            spread.addmm_(e.mT, z[rows] * y[rows])
            total[rows] += z[rows] * (e @ from_p)
            e.scatter_(1, at, torch.where(self._single[rows], t / 2, largest))
            near = own.inner(rows)
            total[rows, 0] += rest[rows, 0] * (near @ scaled)
            near *= embedding_bag(own.keys, e.mT.contiguous(), per_sample_weights=self._t, mode="sum").mT
            total[:, 0] += near.mT @ y[rows, 0]
            total[rows, 0] += near @ y[:, 0]
        total += b_v * seen + z * _pull(self._t, own.keys, seen) + _pull(self._t_p, own.p_keys, spread)
        for rows, p in own.rows:
            total[rows] += own.norm_v**2 * (p @ seen)
        return total


def _pull(t: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """T x for the matrix with entries t (N, n) in columns ``keys``, and x (N, m)."""
    return (t[..., None] * x[keys]).sum(1)


def _push(t: Tensor, keys: Tensor, x: Tensor) -> Tensor:
    """T^T x for the same."""
    return torch.zeros_like(x).index_add_(0, keys.flatten(), (t[..., None] * x[:, None]).flatten(0, 1))
