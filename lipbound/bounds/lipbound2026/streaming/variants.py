r"""`lipbound` and `lipbound_block` for long heads with variants: three numbers of 16 or 32 bits for every pair of tokens, and P formed anew.

Proof: Lemma 119 (docs/theory/long_terms.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.rounding import TensorErrors
from lipbound.bounds.lipbound2026.parts import Sample, samples_of
from lipbound.bounds.lipbound2026.pieces import root
from lipbound.bounds.lipbound2026.streaming.halves import ROWS, Halves
from lipbound.bounds.lipbound2026.streaming.iteration import MAX_STEPS, least_norm
from lipbound.bounds.lipbound2026.streaming.rows import ROW_BYTES, Rows
from lipbound.bounds.lipbound2026.variant_forms import FORM_BYTES, PAIR_BYTES, Covariances, Forms
from lipbound.bounds.lipbound2026.variant_inner import LARGEST, InnerProducts
from lipbound.devices import require
from lipbound.jacobians.rounding import Moments, distance
from lipbound.linalg.matrix_norms import gamma, matrix_norm, power_of_two

PART = 4
"""By how much fewer rows are formed at a time than for plain heads: there are more matrices of that size."""
ADDED = 1 + 2.0**-17
"""What rounding to float32 takes from sums of at most 64 numbers, put back."""
HIDDEN = 2.0**-100
"""More than underflow takes from such a sum, where the largest is about 1."""


def streamed(att: Attention, reach: Sequence[float]) -> Tensor:
    """`lipbound.bounds.lipbound2026.variants.together` without float64 matrices over all pairs of tokens, (samples, heads, 4).

    ``reach``: as for `lipbound.bounds.lipbound2026.parts.in_chunks`. Raises LipboundError where the memory for it is not free.
    """
    kind = ", ".join(sorted(att.variants))
    what = f"our bounds of heads with {kind} at {att.tokens} tokens keep three numbers of 16 or 32 bits for every pair"
    require(memory(att), att.device, what, "measure shorter inputs or fewer samples, or name other bounds")
    found, factors = [], torch.tensor(reach, dtype=torch.float64, device=att.device)[:, None]
    with torch.no_grad():
        for sample in samples_of(att):
            values, largest, away = (torch.stack(part) for part in zip(*(_one(sample, h) for h in range(att.heads)), strict=True))
            found.append(sample.closed(values.mT, largest, away, factors).mT)
    return torch.stack(found)


def memory(att: Attention) -> float:
    """Bytes that it takes, but for the layer's mask, if it has one."""
    n, d, d_v = att.tokens, att.d, att.d_v
    tokens = att.samples * att.heads * (3 * d + 2 * d_v + 16) + 2 * att.samples * att.x.shape[2] + d * (d + 1) // 2 + 2 * LARGEST + 4 * MAX_STEPS
    pairs = 8.0 * n * d * d_v
    square = max(8.0 * n**2 + (pairs if pairs <= PAIR_BYTES else 0.0), 4.0 * n * d * (d + 1))  # pairs of coordinates take twice their room at first
    return 8.0 * n * tokens + square + 12.0 * max(ROW_BYTES / PART, 8 * n) + 8.0 * FORM_BYTES + 8.0 * n * ROWS


def _one(sample: Sample, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """The bounds on one head, (4,), the largest entry of P, and how far J may be from that of the stored tensors."""
    one = sample.layer
    errors = TensorErrors(*(getattr(sample.errors, field.name)[0, head] for field in fields(sample.errors)))
    norms = VariantNorms(one, head, errors)
    away = distance(errors, norms.moments, one.scale, norms.norm_v)
    return norms.values(), norms.largest, away


class VariantNorms:
    r"""Of one head of a float64 layer with one sample; P and its weights are divided by a power of two.

    Attributes:
        moments: of the rows of P. largest: its largest entry. norm_v: :math:`\|W_V\|`.
    """

    def __init__(self, att: Attention, head: int, errors: TensorErrors):
        n, d, d_v = att.tokens, att.d, att.d_v
        self._n, self._c, self.norm_v = n, abs(att.scale), matrix_norm(att.w_v[head])
        self._q, self._k, self._v = att.scale * att.q[0, head], att.centred_k[0, head], att.centred_v[0, head]
        self._rows, self._tokens = Rows(att, head, max(d_v * max(d, d_v), PART * n)), torch.arange(n, device=att.device)
        self._forms = Forms(att, 0, head, slice(None))
        self._o, self._b, self._b_v = torch.zeros_like(self._v), self._v.new_zeros(n), self._v.new_zeros(n)
        stats = self._v.new_zeros(4, n)
        for rows, p in self._rows:
            self._o[rows] = p @ self._v
            stats[:3, rows] = torch.stack([p @ errors.v**2, p @ errors.k**2, p.amax(-1)])
            stats[3] += p.sum(0)
        self.moments, self.largest = Moments.of(stats[0], stats[1], 1.0, stats[2], stats[3]), stats[2].amax()
        self._unit = power_of_two(self.largest)  # a sink may leave probabilities whose squares underflow; J is linear in P and its weights
        size = 2 * self._v.norm(dim=-1).amax()
        self._inner = InnerProducts(att, self._forms.tangents, self._tokens, self._q)
        self._reach, self._image = (Halves(n, att.device, size) for _ in range(2))
        self._terms = torch.zeros(0, dtype=torch.float32, device=att.device)
        self._scale, self._steepest = torch.ones_like(self.largest), torch.zeros_like(self.largest)  # the latter: no |B_i| is larger
        self._measure_lengths()
        self._add_inner_products()
        self._measure_queries()
        del self._forms, self._inner

    def _p(self) -> Iterator[tuple[slice, Tensor]]:
        return ((rows, p / self._unit) for rows, p in self._rows)

    def _weights(self) -> Iterator[tuple[slice, Tensor]]:
        return ((rows, t / self._unit) for rows, _, t in self._rows.with_weights())

    def _parts(self, rows: slice) -> Iterator[slice]:
        """As many tokens as are worth taking at a time."""
        step = self._forms.rows
        return (slice(i, min(i + step, rows.stop)) for i in range(rows.start, rows.stop, step))

    def _measure_lengths(self) -> None:
        r""":math:`|\tilde q_{it}|` into ``_reach``, E_it into ``_image``, as (t, i), and the largest of their products in every row."""
        for part in self._parts(slice(0, self._n)):
            self._reach.put(part, self._forms.lengths(self._tokens[part]))
        count = min(LARGEST, self._n)
        self._keys, self._top = self._tokens.new_zeros(self._n, count), self._v.new_zeros(self._n, count)
        reach, long = self._forms.tangents.size("q", self._tokens).expand(self._n), self._k.norm(dim=-1)
        for rows, t in self._weights():
            e = torch.cdist(self._o[rows], self._v, compute_mode="donot_use_mm_for_euclid_dist").mul_(t)
            self._image.put_columns(rows, e)
            far = self._c * (e @ long)
            self._steepest = torch.maximum(self._steepest, torch.where(far > 0, far * reach[rows], 0.0).amax())
            self._top[rows], self._keys[rows] = self._reach.columns(rows).mul_(e).topk(count, -1)

    def _add_inner_products(self) -> None:
        r"""Those of the largest terms into ``_terms``, token by token; :math:`E_{it} |\tilde q_{it}|` of the others into ``_reach``."""
        self._terms = torch.full((self._n, self._n), HIDDEN, dtype=torch.float32, device=self._v.device)
        self._scale = power_of_two((self._top.amax() + self.norm_v + self._steepest) ** 2)
        order = self._keys.flatten().argsort(stable=True) // self._keys.shape[1]
        chosen = order.split(self._keys.flatten().bincount(minlength=self._n).tolist())
        for metric, mine in zip(self._inner.metrics(), chosen, strict=True):
            at = slice(metric.token, metric.token + 1)
            e, length = self._image.rows(at)[0], self._reach.rows(at)[0]
            weight = e / self._scale
            weight[mine] /= 2  # a pair in which the token is among the largest of both rows comes twice
            for rows in self._inner.parts(mine):
                self._terms[rows] += self._inner.of(metric, rows, length).mul_(e[rows, None]).mul_(weight).float()
            left = e * length
            left[mine] = 0.0
            self._reach.put(at, left[None])

    def _measure_queries(self) -> None:
        r"""What tokens do as queries, into ``_terms``; :math:`E_{it} |W_V^T \tilde q_{it}|` into ``_image``."""
        covariances = Covariances(self._c, self._v, self._k)
        for rows, t in self._weights():
            cov, size_c = covariances.of(t, self._o[rows])
            for part in self._parts(rows):
                at, e = slice(part.start - rows.start, part.stop - rows.start), self._image.rows(part)
                image, self._b[part], self._b_v[part], seen = self._forms.but_lengths(self._tokens[part], cov[at], size_c[at])
                self._terms[part] += (seen * e).div_(self._scale).float()
                self._image.put(part, image * e)

    def values(self) -> Tensor:
        """Upper values of both bounds, and of the largest sums of norms of single tokens by rows and by columns, but for `positive_slack`: (4,)."""
        nothing = self._b.new_zeros(1)
        gram, block = (root(least_norm(apply, self._n, nothing)) for apply in (self._gram, self._block))
        most, columns, at = nothing, torch.zeros_like(self._b), self._tokens
        for rows, p in self._p():
            squares = (p * self.norm_v).square() + 2 * p * self._image.columns(rows) + self._whole_reach(rows).square()
            sizes = root(squares)
            sizes[at[rows] - rows.start, at[rows]] += self._b[rows]
            most, columns = torch.maximum(most, sizes.sum(-1).amax()), columns + sizes.square().sum(0)
        found = torch.cat([gram.view(1), block.view(1), most, root(columns.amax()).view(1)])
        return found * self._unit * (1 + gamma(10 * max(self._q.shape[1] + 1, self._v.shape[1]) + 200))

    def _whole_reach(self, rows: slice) -> Tensor:
        r""":math:`E_{it} |\tilde q_{it}|` of all tokens, (rows, N)."""
        return self._reach.columns(rows).scatter_(1, self._keys[rows], self._top[rows])

    def _gram(self, y: Tensor) -> Tensor:
        """(E_0 + K) y."""
        seen, b, b_v = torch.zeros_like(y), self._b[:, None], self._b_v[:, None]
        for rows, p in self._p():
            seen += p.mT @ y[rows]
        total = b**2 * y + b_v * seen + self._image.transposed_times(seen) + self._reach.transposed_times(self._reach.times(y))
        for rows in self._rows.blocks:
            terms = self._terms[rows].double().mul_(self._scale * ADDED)
            total[rows] += terms @ y
            total += terms.mT @ y[rows]
        back = self.norm_v**2 * seen + b_v * y + self._image.times(y)
        for rows, p in self._p():
            total[rows] += p @ back
        return total

    def _block(self, y: Tensor) -> Tensor:
        """B^T B y for the matrix B of `lipbound_block`."""
        total, b = torch.zeros_like(y), self._b[:, None]
        for rows, p in self._p():
            sizes = p * self.norm_v + self._whole_reach(rows)
            image = sizes @ y + b[rows] * y[rows]
            total += sizes.mT @ image
            total[rows] += b[rows] * image
        return total
