"""A layer at other inputs, of some heads, in another dtype, with its output projection folded in: everything that makes one layer of another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from lipbound.attention.fields import Fields
from lipbound.attention.projections import Projections
from lipbound.attention.residual import ResidualContext
from lipbound.attention.scoring import Scoring
from lipbound.errors import AttentionError

PATTERN = ("wide_q", "q", "wide_k", "k", "centred_k", "p", "weights")
"""What is derived from queries and keys alone."""


class Transforms(Fields, ABC):
    """Copies of an attention layer. Each is a layer of its own, with a cache of its own."""

    @abstractmethod
    def with_parts(
        self,
        *,
        x: Tensor | None = None,
        projections: Projections | None = None,
        scoring: Scoring | None = None,
        valid: Tensor | Literal["same"] | None = "same",
        surroundings: ResidualContext | Literal["same"] | None = "same",
    ) -> Self:
        """A layer with other parts; what is not named stays."""

    # -- where and in what dtype -----------------------------------------------------------------------------------------

    def double(self) -> Self:
        """The same layer in float64 (self when it already is), made once."""
        if self.x.dtype == torch.float64:
            return self
        return self.cache.get("double", lambda: self._map(lambda t: t.double() if t.is_floating_point() else t))

    def to(self, device: str | torch.device) -> Self:
        """The same layer on another device."""
        return self._map(lambda t: t.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self.with_parts(
            x=change(self.x), projections=self.projections.map(change), scoring=self.scoring.map(change),
            valid=None if self.valid is None else change(self.valid),
            surroundings=None if self.surroundings is None else self.surroundings.map(lambda norm: norm.map(change)),
        )  # fmt: skip

    # -- parts of it, and other inputs -------------------------------------------------------------------------------------

    def select(self, samples: slice = slice(None), heads: slice = slice(None)) -> Self:
        """Some samples and heads of the layer."""
        return self.with_parts(
            x=self.x[samples], projections=self.projections.of_heads(heads), scoring=self.scoring.select(samples, heads),
            valid=None if self.valid is None else self.valid[samples],
            surroundings=None if self.surroundings is None else self.surroundings.map(lambda norm: norm.select(samples)),
        )  # fmt: skip

    def unpadded(self, sample: int) -> Self:
        """One sample without its padding tokens: samples = 1 and no ``valid``."""
        part = self.select(slice(sample, sample + 1))
        if self.valid is None:
            return part
        keep = self.valid[sample]
        return part.with_parts(x=part.x[:, keep], scoring=part.scoring.of_tokens(keep), valid=None, surroundings=None)

    def at(self, x: Tensor, *, mask: Tensor | Literal["same"] | None = "same", valid: Tensor | Literal["same"] | None = "same") -> Self:
        """The same layer, with everything that makes it one, at other inputs; differentiable in them.

        Args:
            x: (samples, N, D), any number of samples, in the layer's dtype. A rotation fixes N.
            mask, valid: of these inputs, as in the constructor; the layer's own by default, which must then fit x. ``surroundings``, which hold
                inputs themselves, are dropped.

        Raises:
            AttentionError: shapes that do not fit, another dtype.
        """
        scoring = self.scoring if isinstance(mask, str) else replace(self.scoring, mask=mask)
        return self.with_parts(x=x, scoring=scoring, valid=valid, surroundings=None)

    # -- other weights -------------------------------------------------------------------------------------------------------

    def without_biases(self) -> Self:
        """The same layer without the biases of its projections; the shift of a normalisation of queries or keys, which is none of these, stays."""
        return self.with_parts(projections=self.projections.without_biases(), scoring=self.scoring.without_biases())

    def with_values(self, w_v: Tensor, b_v: Tensor | None, w_o: Tensor | None = None) -> Self:
        """The same attention pattern over other values and output projection; queries, keys and probabilities already computed are shared."""
        other = self.with_parts(projections=replace(self.projections, w_v=w_v, b_v=b_v, w_o=w_o))
        other.cache.share(self.cache, *PATTERN)
        return other

    def fold_output(self) -> tuple[Self, Tensor]:
        """Heads with their output slice, as plain heads of the same Jacobian norm.

        With the thin QR of the transpose, ``w_o[h] = L E^T`` (E: D_out x r with orthonormal columns), the map
        ``x -> out @ w_o[h]`` has the singular values of the head whose value projection is ``w_v[h] @ L``: Lemma 4 (docs/theory/jacobian.md).

        Returns:
            That layer, and E as a tensor (heads, D_out, r), r = min(d_v, D_out).

        Raises:
            AttentionError: when ``w_o`` is not known.
        """
        own = self.projections
        if own.w_o is None:
            raise AttentionError("map 'head_out' needs the output projection w_o, which this layer does not have; use map='head'")
        e, r = torch.linalg.qr(own.w_o.mT)
        fold = r.mT
        return self.with_values(own.w_v @ fold, None if own.b_v is None else (own.b_v[:, None] @ fold)[:, 0]), e

    def unit_values(self, *, together: bool = False) -> tuple[Self, Tensor]:
        """The layer with each head's values (or all heads' ``together``) divided by a power of two near their size, and these numbers (heads,).

        Exact, and keeps products away from overflow and underflow; J is linear in the values: Lemma 4 (docs/theory/jacobian.md).
        """
        own = self.projections
        size = own.w_v.detach().abs().amax((-1, -2)).double()
        if together:
            size = size.amax().expand(len(size))
        unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
        w_v = (own.w_v.double() / unit[:, None, None]).to(own.w_v.dtype)
        b_v = None if own.b_v is None else (own.b_v.double() / unit[:, None]).to(own.w_v.dtype)
        other = self.with_values(w_v, b_v, own.w_o)
        other.cache.keep("centred_v", self.centred_v / unit[:, None, None])
        return other, unit

    @property
    @abstractmethod
    def centred_v(self) -> Tensor:
        """Values as the Jacobian sees them, (samples, heads, N, d_v), float64."""
