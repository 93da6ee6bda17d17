"""Rotary position embeddings of queries and keys."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, TokenStep
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class Rotation(TokenStep):
    r"""A linear map for each token, applied to its query and its key alike.

    Coordinates i and i + r are turned by the token's i-th angle. With :math:`c` = ``cos[n, i]``,
    :math:`s` = ``sin[n, i]``, coordinates a = i and b = i + r of token n become :math:`(c\,a -
    s\,b,\; c\,b + s\,a)`; coordinates from 2r on stay (partial rotation). That is the layout of
    Llama and GPT-NeoX; others differ by the order of coordinates, which no score depends on. Su et
    al. 2021, "RoFormer", equation (34).

    Args:
        cos, sin: (N, r). Not necessarily of length one: scaled variants multiply both by a factor.

    Attributes:
        norm: upper value of the norms of the tokens' maps, at least 1.

    Raises:
        AttentionError: shapes that differ, or NaN or infinite entries.
    """

    cos: Tensor
    sin: Tensor
    norm: float = field(init=False, compare=False, repr=False)
    _cast: dict[torch.dtype, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    axes: ClassVar = {"cos": "n.", "sin": "n."}

    def __post_init__(self) -> None:
        if self.cos.ndim != 2 or self.cos.shape != self.sin.shape or 0 in self.cos.shape:
            raise AttentionError(
                f"cos and sin have shapes {tuple(self.cos.shape)} and {tuple(self.sin.shape)}; "
                "both must be (N, r)"
            )
        largest = float(torch.hypot(self.cos.double(), self.sin.double()).detach().amax())
        if not math.isfinite(largest):
            raise AttentionError("cos or sin contains NaN or infinite numbers")
        object.__setattr__(self, "norm", max(1.0, largest) * (1 + 1e-14))

    @staticmethod
    def of_angles(angles: Tensor) -> "Rotation":
        """Return the rotation by these angles, (N, r), in radians."""
        return Rotation(angles.double().cos(), angles.double().sin())

    @property
    def tokens(self) -> int:
        """Number N of tokens."""
        return len(self.cos)

    @property
    def width(self) -> int:
        """Number 2 r of coordinates that are turned."""
        return 2 * self.cos.shape[1]

    def turn(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """Return vectors (..., N, d) turned by their tokens' maps, by transposes for sign -1."""
        if x.dtype not in self._cast:
            self._cast[x.dtype] = (self.cos.to(x.dtype), self.sin.to(x.dtype))
        cos, sin = self._cast[x.dtype]
        return turned(x, cos, sign * sin)

    def enter(self, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Return projected vectors (samples, heads, N, d) as they enter the scores: turned."""
        return self.turn(y)

    def rounded(self, x: Tensor, y: Tensor, before: Passing) -> Passing:
        """Return what turning makes of upper values about vectors y, its rounding included."""
        own = 8 * UNIT * self.norm
        return Passing(
            self.norm * before.error + own * torch.linalg.vector_norm(y, dim=-1),
            self.norm * before.slope,
            self.norm * before.slope_error + own * before.slope,
        )

    # -- as its own derivative, the same for every entry of a batch --------------------------------

    def push(self, z: Tensor, extra: Tensor | None = None) -> Tensor:
        """Return perturbations z of projected vectors, turned as these are."""
        return self.turn(z)

    def pull(self, g: Tensor) -> tuple[Tensor, None]:
        """Return the transposed map of g."""
        return self.turn(g, -1.0), None

    def turns(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all tokens."""
        return self.cos, self.sin

    def to(self, dtype: torch.dtype) -> Self:
        """Return the same: vectors are turned in their own dtype."""
        return self


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return vectors x (..., d) with coordinates i and i + r turned.

    ``cos`` and ``sin`` (..., r) broadcast to those coordinates.
    """
    r = cos.shape[-1]
    a, b, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    if not torch.is_grad_enabled():  # without temporaries, which cost more than the arithmetic
        lead = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1])
        out = x.new_empty(*lead, x.shape[-1])
        torch.mul(cos, a, out=out[..., :r]).addcmul_(sin, b, value=-1)
        torch.mul(cos, b, out=out[..., r : 2 * r]).addcmul_(sin, a)
        if rest.shape[-1]:
            out[..., 2 * r :] = rest
        return out
    parts = [cos * a - sin * b, cos * b + sin * a]
    if rest.shape[-1]:
        parts.append(rest.expand(*parts[0].shape[:-1], -1))
    return torch.cat(parts, -1)
