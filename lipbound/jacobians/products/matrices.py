"""Products with attention matrices that are in memory, as processors like them."""

import math
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lipbound.linalg.operators import TensorOperator

GRAM_BYTES, FAR_BYTES = 2**20, 2**30
"""Bytes of the attention matrices that one product works on at a time: what a core's own cache
holds, and what keeps another device busy."""
LAUNCHED = 2**23
"""Entries of all attention matrices up to which a GPU takes longer to start a product than to form
it."""


def narrow(a: Tensor, b: Tensor) -> Tensor:
    """Product a @ b for b with few columns, as a transpose: libraries take half as long over it."""
    return (b.mT @ a.mT).mT


def by_columns(t: Tensor) -> Tensor:
    """Return the same numbers laid out column by column, as `narrow` takes its second factor."""
    return t.mT.contiguous().mT


class InParts(TensorOperator):
    """An operator with an N x N matrix for every entry.

    J J^T is applied to so many entries at a time that these stay in the cache.
    """

    def product(self, y: Tensor) -> Tensor:
        """Products J J^T y for all entries at once."""
        return self.jvp(self.vjp(y))

    @cached_property
    def _parts(self) -> list[Self]:
        """Views of so many entries; none where all are taken at once.

        That view would be this operator, which then were freed by the garbage collector only.
        """
        budget = GRAM_BYTES if self.device.type == "cpu" else FAR_BYTES
        together = max(1, int(budget // (self.out_shape[0] ** 2 * self.dtype.itemsize)))
        if self.batch <= together:
            return []
        together = math.ceil(self.batch / math.ceil(self.batch / together))  # of nearly one size
        return [self.select(slice(i, i + together)) for i in range(0, self.batch, together)]

    def graphable(self) -> bool:
        entries = self.batch * self.out_shape[0] ** 2
        return self.device.type == "cuda" and entries <= LAUNCHED and not self._parts

    def gram(self, y: Tensor) -> Tensor:
        if not self._parts:
            return self.product(y)
        pieces = zip(self._parts, y.split(self._parts[0].batch), strict=True)
        return torch.cat([part.product(piece) for part, piece in pieces])
