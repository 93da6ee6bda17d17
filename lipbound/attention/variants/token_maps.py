"""Linear maps, one for each token, from perturbed projections to queries, keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


class TokenStep(ABC):
    """Derivative of one variant: a linear map for each token of each entry of a batch of heads.

    Alike for all entries, tokens and dtypes unless it says otherwise.
    """

    @property
    def direction(self) -> Tensor | None:
        r"""Direction (samples, N, D) of the extra coordinate :math:`\tau` of a change, or None."""
        return None

    @abstractmethod
    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        r"""Return perturbations (batch, N, d) as they go on.

        ``extra`` is :math:`\tau`, (batch, N, 1), where the step sees it.
        """

    @abstractmethod
    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return the transposed map of g (batch, N, d), and the cotangent of :math:`\tau`."""

    def select(self, index: Tensor | slice) -> "TokenStep":
        """Return that for some entries of the batch."""
        return self

    def of_tokens(self, tokens: slice | Tensor) -> "TokenStep":
        """Return that for some tokens; ``direction`` stays."""
        return self

    def double(self) -> "TokenStep":
        """Return the same with products in float64."""
        return self

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines (N, r) of a step that turns coordinates i and i + r.

        None for steps that do anything else.
        """
        return None


@dataclass(frozen=True, eq=False)
class TokenMap:
    r"""The steps that follow the projection of queries, keys or values of a batch of heads.

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
        r"""Direction of the extra coordinate :math:`\tau = direction \cdot dx`, or None.

        (samples, N, D), in the dtype of the products.
        """
        return next((step.direction for step in self.steps if step.direction is not None), None)

    @property
    def extra(self) -> int:
        """Number of coordinates that it sees besides the projected vector, 0 or 1."""
        return 0 if self.direction is None else 1

    def turns(self) -> tuple[Tensor, Tensor] | None:
        """Return those of its only step; None where there are others."""
        return self.steps[0].turns() if len(self.steps) == 1 else None

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        r"""Return perturbations of the projected vectors (batch, N, d) as they arrive.

        ``extra`` is :math:`\tau`, (batch, N, 1), where there is one.
        """
        for step in self.steps:
            z = step.push(z, extra)
        return z

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return the transposed map of g (batch, N, d), and the cotangent of :math:`\tau`."""
        extra = None
        for step in reversed(self.steps):
            g, own = step.pull(g)
            extra = extra if own is None else own
        return g, extra

    def matrices(self, entry: int, tokens: slice | Tensor, d: int) -> Tensor | None:
        r"""Return the maps of some tokens of one entry of the batch, (n, d + extra, d).

        From rows :math:`(dy, \tau)` to rows of queries; None where every map is the identity.
        """
        if not self.steps:
            return None
        one = slice(entry, entry + 1)
        part = replace(self, steps=[step.select(one).of_tokens(tokens) for step in self.steps])
        n = len(range(self.tokens)[tokens]) if isinstance(tokens, slice) else len(tokens)
        eye = torch.eye(d + self.extra, dtype=self.dtype, device=self.device)
        eye = eye[:, None].expand(-1, n, -1)
        return part.push(eye[..., :d], eye[..., d:] if self.extra else None).transpose(0, 1)

    def select(self, index: Tensor | slice) -> "TokenMap":
        """Return some entries of the batch; ``direction``, which has samples instead, stays."""
        return replace(self, steps=[step.select(index) for step in self.steps])

    def double(self) -> "TokenMap":
        """Return the same with products in float64."""
        return replace(self, steps=[step.double() for step in self.steps], dtype=torch.float64)
