"""The bordered matrix of enclosures: from what some vectors leave out to bounds on the whole."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.linalg.krylov import Dots
from lipbound.linalg.matrix_norms import UNIT
from lipbound.linalg.operators import Roundoff


@dataclass
class Bordered:
    r"""T and R_C of enclosures for a batch, and how far they are from exact ones.

    In the notation of Lemma 44 (docs/theory/certificates.md), from vectors z and their images.

    Attributes:
        z: nearly orthonormal rows, (batch, r, n).
        skew: bound on the norm of z z^T - I, (batch,).
        values, turn: eigenvalues of T, ascending, and their vectors, (batch, r) and (batch, r, r).
        r_c: R_C in their basis, (batch, r, r).
        fixed, rate: T is off by at most ``fixed + 2 rate |J^T z|``, T and R_C together by
            ``2 fixed + rate (3 |J^T z| + |J|)``: Lemma 66 (docs/theory/rounding.md).
    """

    z: Tensor
    skew: Tensor
    values: Tensor
    turn: Tensor
    r_c: Tensor
    fixed: Tensor
    rate: Tensor

    def select(self, index: Tensor) -> "Bordered":
        """Return some entries of the batch, ascending."""
        if len(index) == len(self.skew):
            return self
        small = (self.skew, self.values, self.turn, self.r_c, self.fixed, self.rate)
        return Bordered(self.z[index.to(self.z.device)], *(t[index] for t in small))

    @property
    def _reach(self) -> Tensor:
        return (self.values[:, -1].clamp_min(0) + self.fixed).sqrt() + 2 * self.rate

    def slack(self, size: Tensor) -> Tensor:
        """Return a bound on the error of T and R_C together; ``size`` bounds the norm of J."""
        return 2 * self.fixed + self.rate * (3 * self._reach + size)

    def lower(self) -> tuple[Tensor, Tensor]:
        """Return a lower bound on the largest eigenvalue and the vector that attains it.

        (batch,) and (batch, n); up to rounding.
        """
        top = (self.turn[..., -1].to(self.z)[:, None] @ self.z)[:, 0]
        return (self.values[:, -1] - self.fixed - 2 * self.rate * self._reach).clamp_min(0), top

    def _eigenvalue(self, phi: Tensor) -> Tensor:
        r = self.r_c.shape[1]
        corner = phi[:, None, None] * torch.eye(r, dtype=torch.float64)
        upper = torch.cat([torch.diag_embed(self.values), self.r_c.mT], 2)
        m = torch.cat([upper, torch.cat([self.r_c, corner], 2)], 1)
        good = torch.isfinite(m).flatten(1).all(1)
        m = torch.where(good[:, None, None], m, 0.0)
        top = torch.linalg.eigvalsh(m)[:, -1] + 64 * r * UNIT * m.norm(dim=(1, 2))
        return torch.where(good, top, torch.inf)

    def upper(self, phi: Tensor) -> Tensor:
        """Return an upper bound on the largest eigenvalue; ``phi`` bounds the deflated matrix."""
        top = self._eigenvalue(phi) + self.slack(torch.zeros_like(phi))
        # beyond this |J|^2 would exceed what it is at most
        size = (self.rate + (self.rate**2 + 4 * top).sqrt()) / 2
        return torch.nan_to_num(size**2 * (1 + 16 * UNIT), nan=torch.inf, posinf=torch.inf)

    def largest_phi(self, goal: Tensor) -> Tensor:
        """Return the largest phi at which `upper` is at most ``goal``, (batch,); 0 for none.

        To about 1e-12 of ``goal``. It is the Schur complement of what is below the eigenvalue that
        ``goal`` leaves.
        """
        r = self.r_c.shape[1]
        size = (goal / (1 + 16 * UNIT)).clamp_min(0).sqrt()
        top = size**2 - size * self.rate - self.slack(torch.zeros_like(goal))
        squares = self.values.square().sum(1) + 2 * self.r_c.square().sum((1, 2))
        norm = squares.sqrt() + r**0.5 * goal.clamp_min(0)
        gaps = (top - 64 * r * UNIT * norm)[:, None] - self.values
        finite = torch.isfinite(goal) & torch.isfinite(self.r_c).flatten(1).all(1)
        possible = (gaps > 0).all(1) & finite
        scaled = self.r_c / gaps.clamp_min(1e-300).sqrt()[:, None]
        scaled = torch.where(possible[:, None, None], scaled, 0.0)
        complement = torch.linalg.eigvalsh(torch.nan_to_num(scaled @ scaled.mT, posinf=0.0))[:, -1]
        found = gaps[:, -1] + self.values[:, -1] - complement - 1e-12 * goal
        found = torch.where(possible, found.clamp_min(0), 0.0)
        return torch.where(self.upper(found) <= goal, found, 0.0)


def bordered(z: Tensor, y: Tensor, roundoff: Roundoff) -> Bordered:
    """Return T bordered by R_C, from vectors z and computed images y = G z, (batch, r, n) each.

    Rows of z are nearly orthonormal: Lemma 66 (docs/theory/rounding.md).
    """
    r, n = z.shape[1:]
    y = torch.nan_to_num(y)
    t = z @ y.mT
    t = (t + t.mT) / 2
    values, turn = torch.linalg.eigh(t)
    c = turn.mT @ (y - t @ z)
    r_c = torch.linalg.qr(c.mT, mode="r").R
    if r_c.shape[1] < r:
        r_c = torch.cat([r_c, r_c.new_zeros(len(r_c), r - r_c.shape[1], r)], 1)
    per, dots = 2 * (n + 4 * r + 16) * UNIT, Dots(n)
    skew = (dots.gram(z) - torch.eye(r).to(z)).norm(dim=(1, 2)).cpu()
    skew = skew + (2 * dots.roundings + 4 * UNIT) * r
    rate = roundoff.products * r**0.5 * (1 + 1e-6)
    images = y.norm(dim=(1, 2)).cpu() + 2 * roundoff.size * rate + rate**2
    fixed = ((6 * skew + 4 * per * r) * images + 2 * rate**2) * (1 + 1e-6)
    return Bordered(z, skew, values.cpu(), turn.cpu(), r_c.cpu(), fixed, rate)
