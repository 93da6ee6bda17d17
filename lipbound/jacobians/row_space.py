"""Coordinates in which heads see their tokens: the row space of their projections."""

from functools import cached_property

import torch
from torch import Tensor

IN_CACHE = 12
"""Entries whose lengths a CPU takes at a time, in its cache."""


def length_sums(c: Tensor, squares: Tensor) -> Tensor:
    """Return what `length_by_squares` takes, (batch, 3).

    Args:
        c: coordinates, (batch, N, m).
        squares: products w^T w, (batch, m, m).
    """
    together = IN_CACHE if c.device.type == "cpu" else len(c)
    parts = zip(c.split(together), squares.split(together), strict=True)
    sums = torch.cat([(part * (part @ square)).sum(-1).sum(-1) for part, square in parts])
    trace = squares.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.stack([sums, c.square().sum((-1, -2)), trace], 1)


def length_by_squares(
    sums: Tensor, n: int, count: int, m: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return lengths of c w^T, and how much too long they may be, (batch,) each.

    The end of Lemma 71 (docs/theory/rounding.md).

    Args:
        sums: of `length_sums`, float64 on the CPU.
        n: rows of c.
        count: rows of w, of which each entry of the products is a sum.
        m: columns of both.
        dtype: of the sums' arithmetic.
    """
    (value, lengths, trace), known = sums[:, :3].unbind(1), torch.finfo(dtype)
    underflow = m * (count + m + 1) * known.tiny * (lengths + n * m)
    rounding = (count + 2 * m + n + 8) * known.eps * lengths * trace
    least = (value - rounding - underflow).clamp_min(0).sqrt()
    length = value.clamp_min(0).sqrt()
    return length, length - least


SKEW = 1e-11
"""Largest departure from orthogonality of a basis by Cholesky's decomposition."""


def _skew(u: Tensor) -> Tensor:
    """Return norms of u^T u - I, (heads,)."""
    unit = torch.eye(u.shape[2], dtype=u.dtype, device=u.device)
    return torch.linalg.matrix_norm(u.mT @ u - unit)


class RowSpace:
    """Coordinates in which the heads of a layer see their tokens.

    The row space of projections w (heads, D, m) and of spans (D, n) that all heads share: found on
    first use, once for all copies.

    Attributes:
        everything: all D coordinates are taken as they are, which needs no decomposition: where
            few products follow, or spans leave less than half of them out.
        width: number of coordinates m'.
    """

    def __init__(
        self,
        w: Tensor,
        spans: list[Tensor],
        dtype: torch.dtype,
        source: "RowSpace | None" = None,
        *,
        everything: bool = False,
    ):
        self._w, self._spans, self._dtype, self._source = w, spans, dtype, source
        width = w.shape[2] + sum(span.shape[1] for span in spans)
        self.everything = everything or (bool(spans) and 2 * width >= w.shape[1])
        self.width = w.shape[1] if self.everything else min(w.shape[1], width)

    def _whole(self) -> Tensor:
        """Projections w with the spans beside them, float64."""
        w = self._w.double()
        spans = (t.double().expand(len(w), -1, -1) for t in self._spans)
        return torch.cat([w, *spans], -1) if self._spans else w

    @cached_property
    def _both(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float64 u, all of u^T w, and `_skew` of u, which Cholesky gives where that is small.

        A QR decomposition takes longer, and is left to the CPU.
        """
        if self._source is not None:
            return self._source._both
        w = self._whole()
        lower, failed = torch.linalg.cholesky_ex(w.mT @ w)
        u = torch.linalg.solve_triangular(lower, w.mT, upper=False).mT
        if bool(((failed == 0) & ((skew := _skew(u)) <= SKEW)).all()):
            return u, lower.mT, skew
        u, r = (t.to(w.device) for t in torch.linalg.qr(w.cpu()))
        return u, r, _skew(u)

    @property
    def basis(self) -> Tensor:
        """Orthonormal u, (heads, D, m')."""
        if self.everything:
            eye = torch.eye(self._w.shape[1], dtype=self._dtype, device=self._w.device)
            return eye.expand(len(self._w), -1, -1)
        return self._both[0].to(self._dtype)

    @property
    def coordinates(self) -> Tensor:
        """Coordinates u^T w, (heads, m', m), zero below the diagonal but for all coordinates."""
        if self.everything:
            return self._w.to(self._dtype)
        return self._both[1][..., : self._w.shape[2]].to(self._dtype)

    @cached_property
    def square(self) -> Tensor:
        """Products w^T w, formed in float64, (heads, m, m)."""
        if self._source is not None:
            return self._source.square.to(self._dtype)
        w = self._w.double()
        return (w.mT @ w).to(self._dtype)

    @cached_property
    def loss(self) -> Tensor:
        """Upper value of how far singular values move in these coordinates, relatively, ()."""
        if self.everything:
            return torch.zeros((), dtype=torch.float64, device=self._w.device)
        (w, (u, r, skew)), per = (self._whole(), self._both), 2.0**-53
        size = torch.linalg.vector_norm(w, dim=1).clamp_min(1e-290)
        long = torch.linalg.matrix_norm(u)
        length = (sum(w.shape[1:]) + 16) * per * long
        off = torch.linalg.vector_norm(torch.baddbmm(w, u, r, alpha=-1), dim=1) / size
        columns = torch.linalg.vector_norm(off, dim=-1) + length * w.shape[2] ** 0.5
        return (skew + length * long + 4 * columns).amax()

    def to(self, dtype: torch.dtype) -> "RowSpace":
        """The same in another dtype."""
        return RowSpace(self._w, self._spans, dtype, self, everything=self.everything)
