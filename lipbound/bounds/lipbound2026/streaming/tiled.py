r"""`lipbound` for plain heads at lengths where a float32 matrix over all pairs of tokens still fits: the same matrices, tile by tile.

Proof: Lemma 117 (docs/theory/long_terms.md).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lipbound.bounds.lipbound2026.pieces import root
from lipbound.bounds.lipbound2026.streaming.iteration import least_norm
from lipbound.bounds.lipbound2026.streaming.key_gram import KeyGram
from lipbound.bounds.lipbound2026.streaming.packed import Packed
from lipbound.bounds.lipbound2026.streaming.parts import TokenNorms
from lipbound.bounds.lipbound2026.streaming.rows import ROW_BYTES
from lipbound.linalg.matrix_norms import matrix_norm, power_of_two

TILE = 512
"""Rows of a tile, about."""
GROUP = 2
"""Tiles whose rows are there together, and are multiplied with those of one other tile at a time."""
RTOL = 1e-3
"""How far upper values of norms may stay above lower ones: products with matrices that are there cost little."""


def numbers(n: int) -> int:
    """How many float64 numbers are in memory at a time, besides the float32 matrix."""
    return n * max(TILE, ROW_BYTES // (8 * n)) * (2 * GROUP + 6)


class Tiled:
    """The three matrices of `lipbound`, of one head: two share one square, which the third takes over.

    Attributes:
        packed: these.
    """

    def __init__(self, parts: TokenNorms):
        self._parts, blocks = parts, parts.rows.blocks
        count = max(1, TILE // (blocks[0].stop - blocks[0].start))
        self._pieces = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        self.packed = Packed([slice(piece[0].start, piece[-1].stop) for piece in self._pieces], parts.v.device)

    def value(self) -> Tensor:
        """Upper value of the bound, but for `positive_slack`."""
        parts = self._parts
        if not bool(self._size() > 0):
            return root(self._size())
        self.fill()
        together, without = (self._norm(apply) for apply in (self.packed.both, self.packed.upper))
        key = (matrix_norm(parts.a[:, None] * parts.qt) + (parts.a * parts.off_qt).norm()) ** 2
        value, second = torch.minimum(together, without + key), KeyGram(parts)
        if bool(without + second.reached() < value):  # else it cannot be what decides
            off = second.fill(self.packed)
            value = torch.minimum(value, without + self._norm(self.packed.upper) + off)
        return root(value)

    def _norm(self, apply: Callable[[Tensor], Tensor]) -> Tensor:
        return least_norm(apply, len(self._parts.v), self._parts.b.new_zeros(1), rtol=RTOL) * self.packed.scale

    def _size(self) -> Tensor:
        """A number that no entry exceeds by more than its rounding."""
        own = self._parts
        b, b_v, a, z, q = (t.amax() for t in (own.b, own.b_v, own.a, own.z, own.qt_norm))
        return own.norm_v**2 + (b + a * q) ** 2 + 2 * (b_v + z * a)

    def fill(self) -> None:
        """E_0 into the upper matrix, K into the lower one."""
        own, tiles = self._parts, self.packed.tiles
        self.packed.scale = power_of_two(self._size())
        for rows, p in own.rows:  # what two tokens add to E_0 each by itself
            one = own.through_queries(rows).mul_(own.distance(rows).mul_(p)).add_(p * own.b_v)
            self.packed.put(rows, slice(None), one)
        for first in range(0, len(tiles), GROUP):
            last = min(first + GROUP, len(tiles))
            group = self._rows(first, last)
            start, stop = tiles[first].start, tiles[last - 1].stop
            for k in range(first, len(tiles)):
                cols, count = tiles[k], min(tiles[k].stop, stop) - start
                right = [t[cols.start - start : count] for t in group] if k < last else self._rows(k, k + 1)
                self._multiply(slice(start, start + count), cols, [t[:count] for t in group], right)

    def _rows(self, first: int, last: int) -> list[Tensor]:
        """P and E in the rows of some tiles, (rows, N)."""
        own, blocks = self._parts, [rows for piece in self._pieces[first:last] for rows in piece]
        p = torch.cat([own.rows.p(rows) for rows in blocks])
        return [p, torch.cat([own.distance(rows) for rows in blocks]).mul_(p)]

    def _multiply(self, rows: slice, cols: slice, left: list[Tensor], right: list[Tensor]) -> None:
        """Entries of E_0 and K in some rows and the columns of one tile, which the last of the rows may belong to."""
        own, packed, seen = self._parts, self.packed, _common(left[0], right[0])
        (p, e), (p_k, e_k) = ([t[:, seen] for t in pair] for pair in (left, right))
        e_0 = (p @ p_k.mT).mul_(own.norm_v**2).add_(packed.get(rows, cols)).add_(packed.get(cols, rows).mT)
        e_0 += torch.minimum(e @ p_k.mT, own.a[rows, None] * own.p_norm[cols]).mul_(own.z[rows, None])
        e_0 += torch.minimum(p @ e_k.mT, own.p_norm[rows, None] * own.a[cols]).mul_(own.z[cols])
        keys = torch.minimum(e @ e_k.mT, own.a[rows, None] * own.a[cols]).mul_(own.inner(rows, cols))
        before = slice(rows.start, min(rows.stop, cols.start))
        count = before.stop - before.start
        packed.put(before, cols, e_0[:count])
        packed.put(cols, before, keys[:count].mT)
        if count < len(e_0):
            packed.put_diagonal(cols, e_0[count:] + torch.diag_embed(own.b[cols] ** 2), keys[count:])


def _common(p: Tensor, other: Tensor) -> slice:
    """From the first to the last column in which both have entries."""
    columns = ((p != 0).any(0) & (other != 0).any(0)).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 0)
