"""Rotary position embeddings of queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lipbound.attention.variants.base import UNIT, Passing, Shapes, Side, Variant
from lipbound.attention.variants.token_maps import TokenStep
from lipbound.errors import AttentionError


@dataclass(frozen=True)
class Rotation(Variant):
    r"""A linear map for each token, applied to its query and its key alike.

    Coordinates i and i + r are turned by the token's i-th angle. With :math:`c` = ``cos[n, i]``,
    :math:`s` = ``sin[n, i]``, coordinates a = i and b = i + r of token n become :math:`(c\,a -
    s\,b,\; c\,b + s\,a)`; coordinates from 2r on stay (partial rotation). That is the layout of
    Llama and GPT-NeoX; others differ by the order of coordinates, which no score depends on. Su et
    al. 2021, "RoFormer", equation (34).

    Args:
        cos, sin: (N, r). Not necessarily of length one: scaled variants multiply both by a factor.

    Raises:
        AttentionError: shapes that differ, or NaN or infinite entries.
    """

    cos: Tensor
    sin: Tensor
    _cast: dict[torch.dtype, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    name = "rotation"
    title = "rotary position embeddings"
    stage = 1
    place = 0
    axes: ClassVar = {"cos": "n.", "sin": "n."}

    def __post_init__(self) -> None:
        if self.cos.ndim != 2 or self.cos.shape != self.sin.shape or 0 in self.cos.shape:
            raise AttentionError(
                f"cos and sin have shapes {tuple(self.cos.shape)} and {tuple(self.sin.shape)}; "
                "both must be (N, r)"
            )
        if not bool(torch.isfinite(self.cos).all() and torch.isfinite(self.sin).all()):
            raise AttentionError("cos or sin contains NaN or infinite numbers")

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

    @property
    def norm(self) -> float:
        """Upper value of the norms of the tokens' maps, at least 1."""
        squares = self.cos.double() ** 2 + self.sin.double() ** 2
        return max(1.0, float(squares.amax().sqrt())) * (1 + 1e-14)

    def turn(self, x: Tensor) -> Tensor:
        """Return vectors (..., N, d) turned by their tokens' maps."""
        return self._apply(x, 1.0)

    def back(self, x: Tensor) -> Tensor:
        """Return vectors (..., N, d) turned by the transposes of these maps."""
        return self._apply(x, -1.0)

    def _apply(self, x: Tensor, sign: float) -> Tensor:
        if x.dtype not in self._cast:
            self._cast[x.dtype] = (self.cos.to(x.dtype), self.sin.to(x.dtype))
        cos, sin = self._cast[x.dtype]
        return turned(x, cos, sign * sin)

    # -- as a variant ------------------------------------------------------------------------------

    def check(self, shapes: Shapes) -> None:
        if self.tokens != shapes.x[1] or self.width > shapes.w_q[2]:
            raise AttentionError(
                f"rotation is of {self.tokens} tokens and turns {self.width} coordinates; with x "
                f"{shapes.x} and w_q {shapes.w_q} it must be of {shapes.x[1]} tokens and turn at "
                f"most {shapes.w_q[2]}"
            )

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        return self.turn(y) if self.acts_on(side) else y

    def acts_on(self, side: Side) -> bool:
        return side != "v"

    def step(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> "RotationStep | None":
        return RotationStep(self) if self.acts_on(side) else None

    def rounded(self, side: Side, x: Tensor, y: Tensor, before: Passing) -> Passing:
        if not self.acts_on(side):
            return before
        own = 8 * UNIT * self.norm
        return Passing(
            self.norm * before.error + own * torch.linalg.vector_norm(y, dim=-1),
            self.norm * before.slope,
            self.norm * before.slope_error + own * before.slope,
        )


@dataclass(frozen=True)
class RotationStep(TokenStep):
    """The derivative of a rotation, which is the rotation, the same for every entry of a batch."""

    rotation: Rotation

    def push(self, z: Tensor, extra: Tensor | None) -> Tensor:
        """Return perturbations as they go on."""
        return self.rotation.turn(z)

    def pull(self, g: Tensor) -> tuple[Tensor, None]:
        """Return the transposed map of g."""
        return self.rotation.back(g), None

    def of_tokens(self, tokens: slice | Tensor) -> "RotationStep":
        """Return that of some tokens."""
        return RotationStep(self.rotation.of_tokens(tokens))

    def turns(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all tokens."""
        return self.rotation.cos, self.rotation.sin


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
