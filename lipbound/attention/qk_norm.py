"""RMS normalisation of queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.errors import AttentionError


@dataclass(frozen=True)
class QKNorm:
    r"""RMS normalisation of queries or of keys after their projection and before any rotation ("q/k-norm").

    With y a head's projected vector and t what is normalised together (y itself, or the vectors of all heads), n entries long,

    .. math:: y \mapsto gain \circ y / s + bias,\qquad s = (|t|^2 / n + eps)^{1/2}

    LayerNorm is this map after a projection whose columns have had their mean over the n entries taken away. Henry et al. 2020, "Query-Key
    Normalization for Transformers"; Dehghani et al. 2023 for the form with gains.

    Args:
        gain: (heads, d). bias: (heads, d), or None.
        eps: under the root.
        over: projection (D, n) and bias (n,) or None of what is normalised together; None: each head's own vector.

    Raises:
        AttentionError: shapes that do not fit, NaN or infinite entries, a negative eps.
    """

    gain: Tensor
    bias: Tensor | None = None
    eps: float = 0.0
    over: tuple[Tensor, Tensor | None] | None = None

    def __post_init__(self) -> None:
        if self.gain.ndim != 2 or (self.bias is not None and self.bias.shape != self.gain.shape):
            raise AttentionError(f"gain of a normalisation has shape {tuple(self.gain.shape)}; it must be (heads, d), and bias the same")
        if not all(bool(torch.isfinite(t).all()) for t in self._tensors()) or not 0 <= self.eps < torch.inf:
            raise AttentionError("a normalisation has NaN or infinite numbers, or a negative eps")

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.gain, self.bias, *(self.over or ())) if t is not None]

    def together(self, x: Tensor) -> Tensor | None:
        """What is normalised together at inputs (samples, N, D), float64 (samples, N, n); None where each head is by itself."""
        if self.over is None:
            return None
        w, b = self.over
        t = x.double() @ w.double()
        return t if b is None else t + b.double()

    def sizes(self, x: Tensor, y: Tensor) -> Tensor:
        """s for projected vectors y (samples, heads, N, d) of inputs x (samples, N, D): float64, (samples, heads or 1, N, 1); 1 where it is zero."""
        t = self.together(x)
        squares = (y if t is None else t[:, None]).square().mean(-1, keepdim=True) + self.eps
        return torch.where(squares > 0, squares, 1.0).sqrt()

    def undefined(self, x: Tensor, y: Tensor, valid: Tensor | None) -> bool:
        """Whether a vector of length zero is to be normalised without eps, tokens that are not ``valid`` (samples, N) left out."""
        if self.eps > 0:
            return False
        t = self.together(x)
        zero = (y if t is None else t[:, None]).square().sum(-1) == 0
        return bool((zero if valid is None else zero & valid[:, None]).any())

    def apply(self, x: Tensor, y: Tensor) -> Tensor:
        """The normalised vectors, float64, shaped like y."""
        out = y / self.sizes(x, y) * self.gain.double()[:, None]
        return out if self.bias is None else out + self.bias.double()[:, None]

    def select(self, heads: slice) -> "QKNorm":
        """Some of the heads."""
        return replace(self, gain=self.gain[heads], bias=None if self.bias is None else self.bias[heads])

    def map(self, change: Callable[[Tensor], Tensor]) -> "QKNorm":
        """With changed tensors."""
        over = None if self.over is None else (change(self.over[0]), None if self.over[1] is None else change(self.over[1]))
        return QKNorm(change(self.gain), None if self.bias is None else change(self.bias), self.eps, over)
