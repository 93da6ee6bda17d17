"""How perturbations of the projected queries (or keys) arrive in the scores: one linear map for
each token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class TokenStep(Protocol):
    """One linear map for each token of each entry of a batch of heads: the derivative of one
    variant."""

    @property
    def direction(self) -> Tensor | None:
        r"""(samples, N, D): what the extra coordinate :math:`\tau` of a change dx is taken along,
        where the step sees one."""

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        r"""Perturbations (batch, N, d), and :math:`\tau` (batch, N, 1) where the step sees it, as
        they go on, (batch, N, d)."""

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""The transpose: (batch, N, d) -> the same, and the cotangent of :math:`\tau` where the
        step sees it."""

    def select(self, index: Tensor | slice) -> "TokenStep":
        """For some entries of the batch."""

    def of_tokens(self, tokens: slice | Tensor) -> "TokenStep":
        """For some tokens."""

    def double(self) -> "TokenStep":
        """With products in float64."""

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines (N, r) of a step that turns coordinates i and i + r of every token, and
        nothing else; None for others."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    r"""The steps between the projection of queries (or keys) and the scores, one after the other,
    of a batch of heads.

    Attributes:
        steps: in the order in which they act.
        tokens: N.
        dtype, device: of the products.
    """

    steps: Sequence[TokenStep]
    tokens: int
    dtype: torch.dtype
    device: torch.device

    @property
    def direction(self) -> Tensor | None:
        r"""(samples, N, D) in the dtype of the products: what the extra coordinate
        :math:`\tau = direction \cdot dx` is taken along, or None."""
        return next((step.direction for step in self.steps if step.direction is not None), None)

    @property
    def extra(self) -> int:
        """How many coordinates it sees besides the projected vector, 0 or 1."""
        return 0 if self.direction is None else 1

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Those of its only step; None where there are others."""
        return self.steps[0].turns() if len(self.steps) == 1 else None

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        r"""Perturbations of the projected vectors (batch, N, d), and :math:`\tau` (batch, N, 1)
        where there is one, as they arrive, (batch, N, d)."""
        for step in self.steps:
            z = step.push(z, extra)
        return z

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""The transpose: (batch, N, d) -> the same, and the cotangent of :math:`\tau` where there
        is one."""
        extra = None
        for step in reversed(self.steps):
            g, own = step.pull(g)
            extra = extra if own is None else own
        return g, extra

    def matrices(self, entry: int, tokens: slice | Tensor, d: int) -> Tensor | None:
        r"""The maps of some tokens of one entry of the batch from rows :math:`(dy, \tau)` to rows
        of queries, (n, d + extra, d).

        None where every map is the identity.
        """
        if not self.steps:
            return None
        part = replace(
            self,
            steps=[step.select(slice(entry, entry + 1)).of_tokens(tokens) for step in self.steps],
        )
        n = len(range(self.tokens)[tokens]) if isinstance(tokens, slice) else len(tokens)
        eye = torch.eye(d + self.extra, dtype=self.dtype, device=self.device)[:, None].expand(
            -1, n, -1
        )
        return part.push(eye[..., :d], eye[..., d:] if self.extra else None).transpose(0, 1)

    def select(self, index: Tensor | slice) -> "TokenMap":
        """Some entries of the batch; ``direction``, which has samples instead, stays."""
        return replace(self, steps=[step.select(index) for step in self.steps])

    def double(self) -> "TokenMap":
        """With products in float64."""
        return replace(self, steps=[step.double() for step in self.steps], dtype=torch.float64)
