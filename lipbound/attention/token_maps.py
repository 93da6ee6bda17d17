"""How perturbations of queries or keys arrive in the scores: one linear map for each token."""

import torch
from torch import Tensor

from lipbound.attention.qk_norm import QKNorm
from lipbound.attention.rotary import Rotation


class TokenMap:
    r"""How perturbations of the projected queries (or keys) of a batch of heads arrive in the scores: one linear map for each token.

    :math:`dy \mapsto R\,gain \circ (dy - u\,\tau)/s` with u = y / s. Where a head's own vector is normalised :math:`\tau = u \cdot dy / d`; where
    all heads' are together it is a coordinate of its own, :math:`\tau = g \cdot dx`, with ``direction`` g = :math:`T (t/s) / n` for the
    projection T of what is normalised together: Lemma 5 (docs/theory/jacobian.md).

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

    def select(self, index: Tensor | slice) -> "TokenMap":
        """Some entries of the batch; ``direction``, which has samples instead, stays."""
        part = object.__new__(TokenMap)
        part.__dict__.update(self.__dict__)
        if self._gain is not None:
            part._gain, part._unit = self._gain[index], self._unit[index]
        return part

    def double(self) -> "TokenMap":
        """With products in float64."""
        part = object.__new__(TokenMap)
        part.__dict__.update(self.__dict__)
        part.dtype = torch.float64
        if self._gain is not None:
            part._gain, part._unit = self._gain.double(), self._unit.double()
        part.direction = None if self.direction is None else self.direction.double()
        return part
