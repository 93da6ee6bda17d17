"""What stands between the projections of queries or keys and the scores: normalisation and rotation, and their derivative token by token."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipbound.errors import AttentionError
from lipbound.rotation import Rotation


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


class Passage:
    r"""How perturbations of the projected queries (or keys) of a batch of heads arrive in the scores: one linear map for each token.

    :math:`dy \mapsto R\,gain \circ (dy - u\,\tau)/s` with u = y / s. Where a head's own vector is normalised :math:`\tau = u \cdot dy / d`; where
    all heads' are together it is a coordinate of its own, :math:`\tau = g \cdot dx`, with ``direction`` g = :math:`T (t/s) / n` for the
    projection T of what is normalised together.

    Args:
        rotation: of the tokens, or None.
        norm: or None.
        x: inputs of the layer, (samples, N, D). y: projected vectors before normalisation, float64, (samples, heads, N, d).
        dtype: of the products.
    """

    def __init__(self, rotation: Rotation | None, norm: QKNorm | None, x: Tensor, y: Tensor, dtype: torch.dtype):
        self.rotation, self.tokens, self.dtype = rotation, x.shape[1], dtype
        self._gain: Tensor | None = None
        self.direction: Tensor | None = None
        """(samples, N, D) in the dtype of the products, or None."""
        if norm is None:
            return
        sizes = norm.sizes(x, y)
        self._unit = (y / sizes).flatten(0, 1).to(dtype)
        self._gain = (norm.gain.double()[:, None] / sizes).flatten(0, 1).to(dtype)  # gain / s
        together = norm.together(x)
        if norm.over is not None and together is not None:
            self.direction = (together / sizes[:, 0] @ norm.over[0].double().mT / together.shape[-1]).to(dtype)

    @property
    def extra(self) -> int:
        """How many coordinates it sees besides the projected vector, 0 or 1."""
        return 0 if self.direction is None else 1

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        r"""Perturbations of the projected vectors (batch, N, d), and :math:`\tau` (batch, N, 1) where there is one, as they arrive, (batch, N, d)."""
        if self._gain is not None:
            share = (self._unit * z).mean(-1, keepdim=True) if extra is None else extra
            z = (z - self._unit * share) * self._gain
        return z if self.rotation is None else self.rotation.turn(z)

    def pull(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""The transpose: (batch, N, d) -> the same, and the cotangent of :math:`\tau` where there is one."""
        g = g if self.rotation is None else self.rotation.back(g)
        if self._gain is None:
            return g, None
        g = g * self._gain
        inner = self._unit * g
        if self.direction is None:
            return g - self._unit * inner.mean(-1, keepdim=True), None
        return g, -inner.sum(-1, keepdim=True)

    def matrices(self, entry: int, tokens: slice | Tensor, d: int) -> Tensor | None:
        r"""The maps of some tokens of one entry of the batch from rows :math:`(dy, \tau)` to rows of queries, (n, d + extra, d).

        None where every map is the identity.
        """
        if self._gain is None and self.rotation is None:
            return None
        part = self.select(slice(entry, entry + 1))
        part.rotation = None if self.rotation is None else self.rotation.select(tokens)
        device = self.rotation.cos.device if self.rotation is not None else part._gain.device  # type: ignore[union-attr]
        n = len(range(self.tokens)[tokens]) if isinstance(tokens, slice) else len(tokens)
        if self._gain is not None:
            part._gain, part._unit = part._gain[:, tokens], part._unit[:, tokens]  # type: ignore[index]
        eye = torch.eye(d + self.extra, dtype=self.dtype, device=device)[:, None].expand(-1, n, -1)
        return part.push(eye[..., :d], eye[..., d:] if self.extra else None).transpose(0, 1)

    def select(self, index: Tensor | slice) -> "Passage":
        """Some entries of the batch; ``direction``, which has samples instead, stays."""
        part = object.__new__(Passage)
        part.__dict__.update(self.__dict__)
        if self._gain is not None:
            part._gain, part._unit = self._gain[index], self._unit[index]
        return part

    def double(self) -> "Passage":
        """With products in float64."""
        part = object.__new__(Passage)
        part.__dict__.update(self.__dict__)
        part.dtype = torch.float64
        if self._gain is not None:
            part._gain, part._unit = self._gain.double(), self._unit.double()
        part.direction = None if self.direction is None else self.direction.double()
        return part
