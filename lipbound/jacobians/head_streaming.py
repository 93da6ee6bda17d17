"""The Jacobian of heads whose attention matrices do not fit: P is formed anew for some rows at a time, in every product."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.masking import add_mask, four_axes
from lipbound.attention.scoring import Scoring
from lipbound.jacobians.head import HeadJacobian, HeadOperator
from lipbound.linalg.operators import PerEntry

WHOLE_BYTES = {"cpu": 2e9, "cuda": 8e9}
"""Bytes of attention matrices and their temporaries above which they are not kept."""
ROW_BYTES = {"cpu": 2**23, "cuda": 2**29}
"""Bytes of the rows of float64 scores that are formed at a time."""
SCORE_BYTES = 20
"""Bytes for one entry of P while it is computed in float64, and in the products."""


def head_jacobian(att: Attention) -> HeadOperator:
    """`HeadJacobian` where all of P fits, else `StreamedHeadJacobian`."""
    needed = att.samples * att.heads * att.tokens**2 * SCORE_BYTES
    return HeadJacobian(att) if needed <= WHOLE_BYTES.get(att.device.type, WHOLE_BYTES["cpu"]) else StreamedHeadJacobian(att)


@dataclass(init=False, eq=False, repr=False)
class StreamedHeadJacobian(HeadOperator):
    """`HeadOperator` in memory O(N (d + d_v)) per head: rows of P come from q, k, and the largest score and sum of each row, twice in every product.

    Scores are float64, as for `Attention.p`, so the numbers are those of `HeadJacobian` up to the order of summation. Products take about twice
    as long. Not differentiable.
    """

    scale: float
    scoring: Scoring
    valid: Tensor | None
    heads: int
    sloped: bool
    entry: PerEntry[Tensor]
    """Position in the whole batch: sample times heads plus head."""
    wide_q: PerEntry[Tensor]
    wide_k: PerEntry[Tensor]
    top: PerEntry[Tensor]
    """Largest score of each row, (batch, N, 1)."""
    total: PerEntry[Tensor]
    """Sum of each row's exponentials, (batch, N, 1)."""

    def __init__(self, att: Attention):
        self._set(att)
        self.wide_q, self.wide_k = (t.flatten(0, 1) for t in (att.wide_q, att.centred_k))
        self.scale, self.scoring, self.valid, self.heads, self.sloped = att.scale, att.scoring, att.valid, att.heads, att.scoring.sloped
        self.entry = torch.arange(self.batch, device=self.device)
        self.top, self.total = (torch.zeros(self.batch, att.tokens, 1, dtype=torch.float64, device=self.device) for _ in range(2))
        self.o = torch.zeros_like(self.v)
        extras = None if att.scoring.extra_scores is None else att.scoring.extra_scores.double()
        for b in range(self.batch):
            extra = None if extras is None else extras[b % att.heads]
            for rows in self._blocks():
                scores = self._scores(b, rows)
                top = scores.amax(-1, keepdim=True)
                top = top if extra is None else top.maximum(extra.amax())
                self.top[b, rows] = top.masked_fill(top == -torch.inf, 0.0)  # rows of padding attend to nothing
                total = (scores - self.top[b, rows]).exp_().sum(-1, keepdim=True)
                total = total if extra is None else total + (extra - self.top[b, rows]).exp().sum(-1, keepdim=True)
                self.total[b, rows] = total.clamp_min(1.0)
                self.o[b, rows] = self._probabilities(b, rows, scores) @ self.v[b]

    def _blocks(self) -> Iterator[slice]:
        n = self.out_shape[0]
        step = max(1, int(ROW_BYTES.get(self.device.type, ROW_BYTES["cpu"]) // (8 * n)))
        return (slice(i, min(i + step, n)) for i in range(0, n, step))

    def _place(self, b: int) -> tuple[int, int]:
        """Sample and head of an entry."""
        return divmod(int(self.entry[b]), self.heads)

    def _scaled(self, b: int, rows: slice) -> Tensor:
        """scale q k^T for some queries of an entry, (rows, N), float64."""
        return self.scale * (self.wide_q[b, rows] @ self.wide_k[b].mT)

    def _scores(self, b: int, rows: slice) -> Tensor:
        """Masked float64 scores of some queries of an entry, (rows, N)."""
        s, h = self._place(b)
        scores = self.scoring.transformed(self._scaled(b, rows), h, rows)
        if self.scoring.level_mask is not None:
            mask = four_axes(self.scoring.level_mask)
            mask = mask[min(s, mask.shape[0] - 1), min(h, mask.shape[1] - 1)]
            scores = add_mask(scores, mask[rows] if len(mask) > 1 else mask)
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid[s], -torch.inf).masked_fill(~self.valid[s, rows, None], -torch.inf)
        return scores

    def _probabilities(self, b: int, rows: slice, scores: Tensor) -> Tensor:
        """Some rows of P from their scores, (rows, N), in the dtype of the products."""
        return scores.sub_(self.top[b, rows]).exp_().to(self.dtype).div_(self.total[b, rows].to(self.dtype))

    def _rows(self, b: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Some rows of P, and what changes of q k^T are weighted with there, (rows, N) each."""
        p = self._probabilities(b, rows, self._scores(b, rows))
        slopes = self.scoring.slopes(self._scaled(b, rows), self._place(b)[1], rows) if self.sloped else None
        return (p, p) if slopes is None else (p, p * slopes.to(self.dtype))

    def _cotangents(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_q, to_k, to_v = torch.empty_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        for b in range(self.batch):
            for rows in self._blocks():
                (p, weights), part = self._rows(b, rows), y[b, rows]
                g = (part @ self.v[b].mT).sub_((part * self.o[b, rows]).sum(-1, keepdim=True)).mul_(weights)
                torch.mm(g, self.k[b], out=to_q[b, rows])
                to_k[b].addmm_(g.mT, self.q[b, rows])
                to_v[b].addmm_(p.mT, part)
        return to_q, to_k, to_v

    def average(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for b in range(self.batch):
            for rows in self._blocks():
                out[b, rows] = self._rows(b, rows)[0] @ x[b]
        return out

    def column_sums(self) -> Tensor:
        out = torch.zeros(self.batch, self.out_shape[0], dtype=self.dtype, device=self.device)
        for b in range(self.batch):
            for rows in self._blocks():
                out[b] += self._rows(b, rows)[0].sum(0)
        return out

    def largest(self) -> Tensor:
        """A sink's where that is larger."""
        return (1 / self.total[..., 0]).masked_fill((self.o == 0).all(-1), 0.0)

    def push(self, z: Tensor | list[Tensor]) -> Tensor:
        z_q, z_k, z_v = self._arriving(z)
        out = torch.empty_like(self.v)
        for b in range(self.batch):
            for rows in self._blocks():
                p, weights = self._rows(b, rows)
                t = (z_q[b, rows] @ self.k[b].mT).addmm_(self.q[b, rows], z_k[b].mT).mul_(weights)
                out[b, rows] = (t @ self.v[b] - t.sum(-1, keepdim=True) * self.o[b, rows]).addmm_(p, z_v[b])
        return out
