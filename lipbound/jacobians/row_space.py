"""Coordinates in which the heads of a layer see their tokens: what their projections have in common
with each other, and no more."""

from functools import cached_property

import torch
from torch import Tensor


class RowSpace:
    """The row space of projections w (heads, D, m) and of spans (D, n) that all heads share: found
    on first use, once for all copies."""

    def __init__(
        self, w: Tensor, spans: list[Tensor], dtype: torch.dtype, source: "RowSpace | None" = None
    ):
        self._w, self._spans, self._dtype, self._source = w, spans, dtype, source

    def _whole(self) -> Tensor:
        """w with the spans beside it, float64."""
        w = self._w.double()
        return (
            torch.cat([w, *(t.double().expand(len(w), -1, -1) for t in self._spans)], -1)
            if self._spans
            else w
        )

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor]:
        """In float64: u, and all of u^T w."""
        if self._source is not None:
            return self._source._both
        u, r = torch.linalg.qr(self._whole())
        return u, r

    @property
    def basis(self) -> Tensor:
        """Orthonormal u, (heads, D, m')."""
        return self._both[0].to(self._dtype)

    @property
    def coordinates(self) -> Tensor:
        """u^T w, (heads, m', m), zero below the diagonal."""
        return self._both[1][..., : self._w.shape[2]].to(self._dtype)

    @cached_property
    def square(self) -> Tensor:
        """w^T w, (heads, m, m)."""
        w = self._w.to(self._dtype)
        return w.mT @ w

    @cached_property
    def loss(self) -> float:
        """An upper value of how far singular values of a map of w move, relatively, where its
        coordinates take the place of w; of all heads."""
        (m, n), per = self._whole().shape[1:], 2.0**-53
        unit, found = (
            torch.eye(self._both[0].shape[2], dtype=torch.float64, device=self._w.device),
            [],
        )
        for w, u, r in zip(
            self._whole(), *self._both, strict=True
        ):  # one after the other, in the cache
            size, length = w.norm(dim=0).clamp_min(1e-290), (m + n + 16) * per * u.norm()
            columns = (torch.addmm(w, u, r, alpha=-1).norm(dim=0) / size).norm() + length * n**0.5
            found.append((u.mT @ u - unit).norm() + length * u.norm() + 4 * columns)
        return float(torch.stack(found).amax())

    def double(self) -> "RowSpace":
        """In float64."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> "RowSpace":
        """In another dtype."""
        return RowSpace(self._w, self._spans, dtype, self)
