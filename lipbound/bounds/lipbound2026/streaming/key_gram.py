r"""The sum over rows of :math:`|\tilde q_i|^2 A_i^T A_i`, whose norm is the second number of L in `lipbound`, for long plain heads.

It is symmetric with entries of either sign; the norm of the absolute values is at least its own: Lemma 117 (docs/theory/long_terms.md).
"""

import torch
from torch import Tensor

from lipbound.bounds.lipbound2026.pieces import lengths
from lipbound.bounds.lipbound2026.streaming.packed import Packed
from lipbound.bounds.lipbound2026.streaming.parts import TokenNorms
from lipbound.linalg.matrix_norms import gamma, power_of_two

PANEL = 2
"""Tiles whose rows of the sum are formed at a time."""
STEPS = 3
"""Power steps that show how large its norm is, at least."""


class KeyGram:
    """Of one head."""

    def __init__(self, parts: TokenNorms):
        self._parts = parts
        self._half = parts.o.square().sum(-1, keepdim=True) / 2

    def reached(self) -> Tensor:
        """A number that its norm is not below, but for rounding: a Rayleigh quotient after `STEPS` steps from its diagonal."""
        own = self._parts
        y = torch.zeros_like(own.b)
        for rows, p in own.rows:
            y += (own.distance(rows).mul_(p).mul_(own.qt_norm[rows, None])).square().sum(0)
        y = y[:, None]
        for _ in range(STEPS):
            y, before = self._times(y / y.norm().clamp_min(1e-300)), y
        return (y * before).sum() / before.norm().clamp_min(1e-300)

    def _times(self, y: Tensor) -> Tensor:
        own, total = self._parts, torch.zeros_like(y)
        for rows, p in own.rows:
            o = own.o[rows]
            image = (p @ (own.v * y) - o * (p @ y)) * own.qt_norm[rows, None] ** 2
            total += (own.v * (p.mT @ image)).sum(-1, keepdim=True) - p.mT @ (o * image).sum(-1, keepdim=True)
        return total

    def fill(self, packed: Packed) -> Tensor:
        """Put absolute values of its entries into the upper matrix; returns what rounding may have taken from the norm."""
        own = self._parts
        n, size = len(own.v), torch.zeros_like(own.norm_v)
        far, out = lengths(own.v), lengths(own.o)
        for rows, p in own.rows:
            size = size + (p * own.qt_norm[rows, None] * (far + out[rows, None])).square().sum()
        packed.scale = power_of_two(size)  # no entry is larger
        for first in range(0, len(packed.tiles), PANEL):
            panel = packed.tiles[first : first + PANEL]
            start, width = panel[0].start, panel[-1].stop - panel[0].start
            pairs, mixed = (size.new_zeros(width, n - start) for _ in range(2))
            for rows, p in own.rows:
                if not bool((p[:, start : start + width] != 0).any()):
                    continue
                p = p[:, start:] * own.qt_norm[rows, None]
                moved = (own.o[rows] @ own.v[start:].mT).sub_(self._half[rows]).mul_(p)
                pairs.addmm_(p[:, :width].mT, p)
                mixed.addmm_(moved[:, :width].mT, p).addmm_(p[:, :width].mT, moved)
            mine = slice(start, start + width)
            entries = (own.v[mine] @ own.v[start:].mT).mul_(pairs).sub_(mixed).abs_()
            entries[:, :width] = torch.maximum(entries[:, :width], entries[:, :width].mT)  # rounding may not leave it symmetric
            packed.put(mine, slice(start, None), entries)
        return size * gamma(n + own.v.shape[-1] + 10)
