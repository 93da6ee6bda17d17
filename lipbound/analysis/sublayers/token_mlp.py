r"""The MLP of a transformer block, token by token: its Jacobian, its norm, and how far the Jacobian changes around an input.

With :math:`z = W_1 y + b_1` a plain MLP is :math:`W_2\,\sigma(z)`, a gated one :math:`W_2\,(\sigma(z) \circ (W_u y + b_u))`. Lemma 112
(docs/theory/networks.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipbound.analysis.sublayers.activations import Activation

SLACK = 1 + 1e-10
"""Allowance for rounding, on norms of matrices computed in float64."""


@dataclass(frozen=True)
class TokenMLP:
    """An MLP at the tokens of one sample, float64.

    Attributes:
        y: its inputs, (N, D).
        inner, outer: :math:`W_1` (F, D) and :math:`W_2` (D, F). bias: b_1 (F,).
        activation: between them.
        gate: :math:`W_u` (F, D) and b_u (F,), or None.
    """

    y: Tensor
    inner: Tensor
    bias: Tensor
    outer: Tensor
    activation: Activation
    gate: tuple[Tensor, Tensor] | None = None

    @property
    def _z(self) -> Tensor:
        return self.y @ self.inner.mT + self.bias

    @property
    def _up(self) -> Tensor:
        assert self.gate is not None
        return self.y @ self.gate[0].mT + self.gate[1]

    def _slopes(self) -> tuple[Tensor, Tensor | None]:
        """Diagonals that stand between W_2 and W_1, and between W_2 and W_u, (N, F)."""
        slope = self.activation.slope(self._z)
        return (slope, None) if self.gate is None else (slope * self._up, self.activation.value(self._z))

    def jvp(self, dy: Tensor) -> Tensor:
        """J dy, (N, D)."""
        inner, up = self._slopes()
        hidden = inner * (dy @ self.inner.mT)
        if up is not None:
            assert self.gate is not None
            hidden = hidden + up * (dy @ self.gate[0].mT)
        return hidden @ self.outer.mT

    def vjp(self, dx: Tensor) -> Tensor:
        """J^T dx, (N, D)."""
        inner, up = self._slopes()
        hidden = dx @ self.outer
        result = (inner * hidden) @ self.inner
        if up is not None:
            assert self.gate is not None
            result = result + (up * hidden) @ self.gate[0]
        return result

    def norm(self) -> Tensor:
        """An upper value of the norm of the Jacobian, the largest over tokens, ()."""
        inner, up = self._slopes()
        most = self.y.new_zeros(())
        for i in range(len(self.y)):
            jacobian = (self.outer * inner[i]) @ self.inner
            if up is not None:
                assert self.gate is not None
                jacobian = jacobian + (self.outer * up[i]) @ self.gate[0]
            most = torch.maximum(most, _largest(jacobian @ jacobian.mT).sqrt())
        return most * SLACK

    def change(self, radius: float) -> Tensor:
        r"""An upper value of :math:`\|J(y') - J(y)\|` over all y' with :math:`|y'_i - y_i| \le` ``radius`` for every token, ()."""
        reach = radius * self.inner.norm(dim=1)
        change = self.activation.slope_change(self._z, reach)
        if self.gate is None:
            return self._between(change, self.inner)
        weights, _ = self.gate
        further = radius * weights.norm(dim=1)
        least, most = self.activation.slopes(self._z, reach)
        steepest = torch.maximum(least.abs(), most.abs())
        inner = change * self._up.abs() + steepest * further
        return self._between(inner, self.inner) + self._between(steepest * reach, weights)

    def _between(self, diagonal: Tensor, inner: Tensor) -> Tensor:
        r"""The largest over tokens of :math:`\|W_2\,diag(\sqrt\delta)\|\,\|diag(\sqrt\delta)\,W\|` for diagonals :math:`\delta` >= 0, (N, F)."""
        most = self.y.new_zeros(())
        for delta in diagonal:
            left, right = (self.outer * delta) @ self.outer.mT, inner.mT @ (delta[:, None] * inner)
            most = torch.maximum(most, (_largest(left) * _largest(right)).sqrt())
        return most * SLACK


def _largest(square: Tensor) -> Tensor:
    """The largest eigenvalue of a positive semi-definite matrix, ()."""
    return torch.linalg.eigvalsh(square)[-1].clamp_min(0)
