"""The penalty of Specformer (Hu et al. 2024) on the spectral norms of projections."""

import torch
from torch import Tensor, nn

from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError
from lipbound.models.training.differentiable import projections


class Specformer(nn.Module):
    r"""The penalty of Hu et al. 2024 on squared spectral norms.

    .. math::
        \sum_{l,h} \lambda_Q \sigma_1^2(W_Q) + \lambda_K \sigma_1^2(W_K)
        + \lambda_V \sigma_1^2(W_V)

    :math:`\sigma_1` is found by power iteration that goes on from call to call, as in the paper;
    its derivative is that of :math:`(u^T W v)^2` at the vectors found.

    Args:
        l_q: :math:`\lambda_Q`, the weight of queries.
        l_k: :math:`\lambda_K`, the weight of keys.
        l_v: :math:`\lambda_V`, the weight of values.
        steps: of power iteration in each call; the first call takes twenty.
    """

    def __init__(self, l_q: float, l_k: float, l_v: float, *, steps: int = 1):
        super().__init__()
        self.weights, self.steps = (l_q, l_k, l_v), steps
        self._vectors: dict[tuple[str, int], Tensor] = {}

    @in_own_modes
    def forward(self, model: nn.Module) -> Tensor:
        """Return the penalty, a scalar.

        Args:
            model: whose projections have known names
                (`lipbound.models.training.differentiable.projections`).

        Raises:
            LipboundError: all three weights are 0.
        """
        terms = [
            factor * self._squared((found.name, i), w)
            for found in projections(model)
            for i, (w, factor) in enumerate(zip(found.w, self.weights, strict=True))
            if factor
        ]
        if not terms:
            raise LipboundError(
                "all three weights of Specformer are 0, so there is nothing to penalise"
            )
        return sum(terms[1:], terms[0])

    def _squared(self, key: tuple[str, int], w: Tensor) -> Tensor:
        """Return the sum over heads of sigma_1(w)^2, w (heads, D, d)."""
        fixed = w.detach()
        fresh = key not in self._vectors
        if fresh:
            generator = torch.Generator().manual_seed(0)
            self._vectors[key] = torch.randn(w.shape[0], w.shape[2], 1, generator=generator).to(w)
        v = self._vectors[key].to(w)
        for _ in range(20 if fresh else self.steps):
            u = nn.functional.normalize(fixed @ v, dim=1)
            v = nn.functional.normalize(fixed.mT @ u, dim=1)
        self._vectors[key] = v
        u = nn.functional.normalize(fixed @ v, dim=1)
        return ((u * (w @ v)).sum((1, 2)) ** 2).sum()
