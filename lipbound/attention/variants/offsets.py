"""Positions that are added to the tokens that queries and keys are made of."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, Shapes, Side, Variant
from lipbound.errors import AttentionError


@dataclass(frozen=True, eq=False)
class Offsets(Variant):
    r"""Queries and keys :math:`W^T (x_i + p_i) + b`, of which :math:`W^T p_i` stays.

    Carion et al. 2020 (DETR), section 3.2: positions are added to what queries and keys are made
    of, and not to what values are. Before any normalisation.

    Args:
        q, k: what is added to the projections of each token, (heads, samples or 1, N, d); None for
            nothing.
    """

    q: Tensor | None
    k: Tensor | None

    name = "offsets"
    title = "positions added to queries and keys"
    stage = 0
    place = 7
    axes: ClassVar = {"q": "hsn.", "k": "hsn."}

    @property
    def parts(self) -> list[str]:
        return ["offsets of queries and keys"]

    def tensors(self) -> dict[str, Tensor]:
        found = {"offsets of queries": self.q, "offsets of keys": self.k}
        return {name: t for name, t in found.items() if t is not None}

    def check(self, shapes: Shapes) -> None:
        heads, (samples, n), d = shapes.w_q[0], shapes.x[:2], shapes.w_q[2]
        for name, t in self.tensors().items():
            if t.ndim != 4 or t.shape[1] not in (1, samples) or t.shape[::2] != (heads, n):
                raise AttentionError(
                    f"{name} have shape {tuple(t.shape)}; it must be {(heads, samples, n, d)}, or "
                    "1 in the place of the samples"
                )

    def acts_on(self, side: Side) -> bool:
        return self.of(side) is not None

    def of(self, side: Side) -> Tensor | None:
        """Return what is added to queries, keys or values, (samples or 1, heads, N, d), float64."""
        t = {"q": self.q, "k": self.k, "v": None}[side]
        return None if t is None else t.double().transpose(0, 1)

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        added = self.of(side)
        return y if added is None else y + added

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        added = self.of(side)
        if added is None:
            return before
        length = torch.linalg.vector_norm(y, dim=-1) + torch.linalg.vector_norm(added, dim=-1)
        return before._replace(error=before.error + 2 * UNIT * length)
