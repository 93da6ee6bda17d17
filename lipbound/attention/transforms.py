"""A layer at other inputs, of some heads, in another dtype, with its output projection folded in:
everything that makes one layer of another."""

import math
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
WIDE = ("wide_q", "centred_k", "centred_v")
"""Those in float64 whatever the layer's dtype, and free of biases that J does not see."""
ORDINARY = 16
"""Logarithms to base 2 within which sizes of tensors are left as they are by
`Transforms.unit_scales`."""
LARGEST_SCORES = 80
"""Logarithm to base 2 of the size of scores beyond which no bound is evaluated."""
ZERO = -100_000
"""Stands for the logarithm of zero."""


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
        check: bool = True,
    ) -> Self:
        """A layer with other parts; what is not named stays."""

    # -- where and in what dtype -------------------------------------------------------------------

    def double(self) -> Self:
        """The same layer in float64 (self when it already is), made once. The mask is the layer's
        own: it is added to float64 scores anyway."""
        if self.x.dtype == torch.float64:
            return self
        return self.cache.get(
            "double",
            lambda: self._map(
                lambda t: t.double() if t.is_floating_point() else t, check=False, mask=False
            ),
        )

    def to(self, device: str | torch.device) -> Self:
        """The same layer on another device."""
        return self._map(lambda t: t.to(device))

    def detached(self) -> Self:
        """The same layer without derivatives, of copies of its tensors: also where those were made
        in inference mode."""
        return self._map(lambda t: t.detach().clone(), check=False)

    def _map(
        self, change: Callable[[Tensor], Tensor], *, check: bool = True, mask: bool = True
    ) -> Self:
        return self.with_parts(
            x=change(self.x),
            projections=self.projections.map(change),
            scoring=self.scoring.map(change, mask=mask),
            valid=None if self.valid is None else change(self.valid),
            surroundings=None
            if self.surroundings is None
            else self.surroundings.map(lambda norm: norm.map(change)),
            check=check,
        )

    # -- parts of it, and other inputs -------------------------------------------------------------

    def select(self, samples: slice = slice(None), heads: slice = slice(None)) -> Self:
        """Some samples and heads of the layer, one of each at least."""
        x, projections = self.x[samples], self.projections.of_heads(heads)
        return self.with_parts(
            x=x,
            projections=projections,
            scoring=self.scoring.select(samples, heads),
            valid=None if self.valid is None else self.valid[samples],
            surroundings=None
            if self.surroundings is None
            else self.surroundings.map(lambda norm: norm.select(samples)),
            check=0 in (len(x), len(projections.w_q)),
        )

    def unpadded(self, sample: int) -> Self:
        """One sample without its padding tokens: samples = 1 and no ``valid``."""
        one = slice(sample, sample + 1)
        valid, scoring = (
            None if self.valid is None else self.valid[one],
            self.scoring.select(one, slice(None)),
        )
        part = self.with_parts(
            x=self.x[one], scoring=scoring, valid=valid, surroundings=None, check=False
        )
        if self.valid is None:
            return part
        keep = self.valid[sample]
        return part.with_parts(
            x=part.x[:, keep], scoring=part.scoring.of_tokens(keep), valid=None, surroundings=None
        )

    def at(
        self,
        x: Tensor,
        *,
        mask: Tensor | Literal["same"] | None = "same",
        valid: Tensor | Literal["same"] | None = "same",
    ) -> Self:
        """The same layer, with everything that makes it one, at other inputs; differentiable in
        them.

        Args:
            x: (samples, N, D), any number of samples, in the layer's dtype. A rotation fixes N.
            mask, valid: of these inputs, as in the constructor; the layer's own by default, which
                must then fit x. ``surroundings``, which hold inputs themselves, are dropped.

        Raises:
            AttentionError: shapes that do not fit, another dtype.
        """
        scoring = self.scoring if isinstance(mask, str) else replace(self.scoring, mask=mask)
        return self.with_parts(x=x, scoring=scoring, valid=valid, surroundings=None)

    # -- other weights -----------------------------------------------------------------------------

    def without_biases(self) -> Self:
        """The same layer without the biases of its projections; the shift of a normalisation of
        queries or keys, which is none of these, stays."""
        return self.with_parts(
            projections=self.projections.without_biases(), scoring=self.scoring.without_biases()
        )

    def with_values(
        self, w_v: Tensor, b_v: Tensor | None, w_o: Tensor | None = None, *, check: bool = True
    ) -> Self:
        """The same attention pattern over other values and output projection; queries, keys and
        probabilities already computed are shared.

        ``check``: whether to look at the numbers.
        """
        other = self.with_parts(
            projections=replace(self.projections, w_v=w_v, b_v=b_v, w_o=w_o), check=check
        )
        other.cache.share(self.cache, *PATTERN)
        return other

    def fold_output(self) -> tuple[Self, Tensor]:
        """Heads with their output slice, as plain heads of the same Jacobian norm.

        With the thin QR of the transpose, ``w_o[h] = L E^T`` (E: D_out x r with orthonormal
        columns), the map ``x -> out @ w_o[h]`` has the singular values of the head whose value
        projection is ``w_v[h] @ L``: Lemma 4 (docs/theory/jacobian.md).

        Returns:
            That layer, and E as a tensor (heads, D_out, r), r = min(d_v, D_out).

        Raises:
            AttentionError: when ``w_o`` is not known.
        """
        own = self.projections
        if own.w_o is None:
            raise AttentionError(
                "map 'head_out' needs the output projection w_o, which this layer does not have; "
                "use map='head'"
            )
        e, r = torch.linalg.qr(own.w_o.mT)
        fold = r.mT
        return self.with_values(
            own.w_v @ fold, None if own.b_v is None else (own.b_v[:, None] @ fold)[:, 0]
        ), e

    def unit_values(self, *, together: bool = False) -> tuple[Self, Tensor]:
        """The layer with each head's values (or all heads' ``together``) divided by a power of two
        near their size, and these numbers (heads,).

        Exact, and keeps products away from overflow and underflow; J is linear in the values: Lemma
        4 (docs/theory/jacobian.md).
        """
        own = self.projections
        size = own.w_v.detach().abs().amax((-1, -2)).double()
        if together:
            size = size.amax().expand(len(size))
        unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
        w_v = (own.w_v.double() / unit[:, None, None]).to(own.w_v.dtype)
        b_v = None if own.b_v is None else (own.b_v.double() / unit[:, None]).to(own.w_v.dtype)
        other = self.with_values(
            w_v, b_v, own.w_o, check=not (b_v is None or bool(torch.isfinite(b_v).all()))
        )
        other.cache.keep("centred_v", self.centred_v / unit[:, None, None])
        return other, unit

    def unit_scales(self) -> tuple[Self, Tensor, Tensor]:
        r"""The layer in float64 with tensors of ordinary size, whose Jacobians are those of this
        one but for known powers of two.

        :math:`(x, W_Q, W_K)` and :math:`(2^a x, 2^{b-a} W_Q, 2^{-b-a} W_K)`, with biases of queries
        and keys times :math:`2^{\pm b}`, have one J, which is linear in the values: Lemma 73
        (docs/theory/upper_values.md). Biases that J does not see are dropped. Layers whose sizes
        lie within :math:`2^{\pm 16}` stay as they are, and share what is derived from them. Queries
        and keys that are normalised keep their size.

        Returns:
            That layer; exponents (heads,) of the powers of two that its J is to be multiplied with;
            and whether all this is exact and logits are in the range in which bounds can be
            evaluated, (samples, heads) bool.
        """
        exact = torch.ones(self.samples, self.heads, dtype=torch.bool, device=self.device)
        wide, invariant, ordinary = (
            self.double(),
            "qk_norm" not in self.scoring.names,
            self.ordinary(),
        )
        if ordinary is not None:
            return ordinary, torch.zeros(self.heads, dtype=torch.long, device=self.device), exact
        own, sizes, e_x, e_c = wide._sizes()
        e_x = 0 if e_x == ZERO else e_x
        steps, logits = _steps(sizes, e_x, e_c, invariant)
        moved = {name: _times(t, steps[name]) for name, t in own.tensors().items() if name in steps}
        for name, t in moved.items():
            exact &= (_times(t, -steps[name]) == getattr(own, name)).flatten(1).all(1)
        by_x = torch.full((self.samples,), -e_x, device=self.device)
        x, variants = (
            _times(wide.x, by_x),
            [step.of_scaled_inputs(-e_x) for step in wide.scoring.steps],
        )
        exact &= (_times(x, -by_x) == wide.x).all() & (logits <= LARGEST_SCORES)
        exact &= all(
            torch.equal(t, u) for old, new in zip(wide.scoring.steps, variants, strict=True)
            for t, u in zip(old.inputs(), new.of_scaled_inputs(e_x).inputs(), strict=True)
        )  # fmt: skip
        # nothing is said of other heads, whose numbers may be too large to compute with
        moved = {
            name: t.where(exact.all(0).view(-1, *[1] * (t.ndim - 1)), torch.zeros_like(t))
            for name, t in moved.items()
        }
        scale = math.ldexp(self.scale, -e_c) if invariant else self.scale
        scoring = replace(wide.scoring, scale=scale, steps=tuple(variants))
        return (
            wide.with_parts(
                x=x, projections=replace(own, **moved), scoring=scoring, surroundings=None
            ),
            -steps["w_v"],
            exact,
        )

    def on_one_scale(
        self, exponents: Tensor, *, projected: bool, fixed: bool
    ) -> tuple[Self, Tensor, Tensor]:
        """Heads whose J are to be multiplied with powers of two, as a layer whose J is to be
        multiplied with one for all of them.

        Args:
            exponents: of these powers, (heads,).
            projected: whether heads are projected by ``w_o`` and added; else they are side by side.
            fixed: whether that one power must be 2^0.

        Returns:
            That layer; its exponent, (heads,) alike; and whether all this is exact, () bool.
        """
        own = self.projections
        found = {"w_o": own.w_o} if projected else {"w_v": own.w_v, "b_v": own.b_v}
        given = {name: t for name, t in found.items() if t is not None}
        sizes = torch.stack([_exponents(t) + exponents for t in given.values()])
        top = sizes.amax().clamp_min(ZERO // 2) * (not fixed)
        by = exponents - torch.where(top > ZERO // 2, top, 0)
        moved = {name: _times(t, by) for name, t in given.items()}
        exact = torch.stack([(_times(t, -by) == given[name]).all() for name, t in moved.items()])
        moved = {name: t.where(exact.all(), torch.zeros_like(t)) for name, t in moved.items()}
        other = self.with_parts(projections=replace(own, **moved), check=False)
        return other, exponents - by, exact.all()

    def ordinary(self, *, projected: bool = False) -> Self | None:
        """The layer in float64 without biases that J does not see, if its sizes, with ``projected``
        also those of ``w_o``, are ordinary; else None."""
        own, sizes, *ends = self._sizes()
        outer = [_exponents(own.w_o)] if projected and own.w_o is not None else []
        every = torch.cat([*sizes.values(), *outer, torch.tensor(ends, device=self.device)])
        if not bool(((every.abs() <= ORDINARY) | (every == ZERO)).all()):
            return None
        wide = self.x.dtype == torch.float64
        if wide and own.b_k is self.b_k and own.b_v is self.b_v and self.surroundings is None:
            return self
        scoring = (
            self.scoring
            if wide
            else self.scoring.map(lambda t: t.double() if t.is_floating_point() else t)
        )
        other = self.with_parts(
            x=self.x.double(),
            projections=own.map(lambda t: t.double()),
            scoring=scoring,
            surroundings=None,
            check=False,
        )
        other.cache.share(self.cache, *(("q", "p", "weights") if wide else ()), *WIDE)
        return other

    def _sizes(self) -> tuple[Projections, dict[str, Tensor], int, int]:
        """Projections without biases that J does not see; exponents of their sizes, of that of x
        and of ``scale``."""
        own, scoring = self.projections, self.scoring
        own = replace(own, b_k=None if scoring.plain_keys and scoring.shift_invariant else own.b_k,
                      b_v=None if scoring.extra_scores is None else own.b_v)  # fmt: skip
        sizes = {name: _exponents(t) for name, t in own.tensors().items() if name != "w_o"}
        return own, sizes, int(_exponents(self.x[None])[0]), math.frexp(self.scale)[1]

    def of_samples(self, samples: slice) -> Self:
        """The layer at some of its inputs, with what has been derived at all of them."""
        part = self.with_parts(
            x=self.x[samples],
            scoring=self.scoring.select(samples, slice(None)),
            valid=None if self.valid is None else self.valid[samples],
            surroundings=None
            if self.surroundings is None
            else self.surroundings.map(lambda norm: norm.select(samples)),
            check=False,
        )
        part.cache.share(self.cache, *PATTERN, *WIDE, change=lambda t: t[samples])
        return part

    @property
    @abstractmethod
    def centred_v(self) -> Tensor:
        """Values as the Jacobian sees them, (samples, heads, N, d_v), float64."""


def _exponents(t: Tensor) -> Tensor:
    """Of the largest entries of (n, ...), (n,): `ZERO` where all are zero."""
    size = torch.linalg.vector_norm(t.detach().flatten(1), torch.inf, dim=1)
    return torch.where(size > 0, torch.frexp(size).exponent.long(), ZERO)


def _steps(
    sizes: dict[str, Tensor], e_x: int, e_c: int, invariant: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Exponents to change projections by, (heads,) each, when inputs change by -e_x, and those of
    the logits' sizes (0 where unknown).

    ``invariant``: whether only products of queries and keys count.
    """

    def of(w: str, b: str, shift: int) -> Tensor:
        """The larger of a weight's and its bias's."""
        size = torch.where(sizes[w] == ZERO, ZERO, sizes[w] + shift)
        return torch.maximum(size, sizes[b]) if b in sizes else size

    e_q, e_k, e_v = of("w_q", "b_q", e_x), of("w_k", "b_k", e_x), of("w_v", "b_v", e_x)
    e_v = torch.where(e_v == ZERO, 0, e_v - e_x)
    up_q = up_k = logits = torch.zeros_like(e_q)
    if invariant:
        e_k = torch.where(e_k == ZERO, torch.where(e_q == ZERO, 0, -e_c - e_q), e_k)
        e_q = torch.where(e_q == ZERO, -e_c - e_k, e_q)
        logits = e_c + e_q + e_k
        up_q = logits // 2 - e_q
        up_k = e_c - up_q
    return {
        "w_q": e_x + up_q,
        "b_q": up_q,
        "w_k": e_x + up_k,
        "b_k": up_k,
        "w_v": -e_v,
        "b_v": -e_v - e_x,
    }, logits


def _times(t: Tensor, exponents: Tensor) -> Tensor:
    """Entries of t (n, ...), float64, times 2 to the exponents (n,), in steps whose factors are in
    the range of float64."""
    for part in (exponents // 4, (exponents + 1) // 4, (exponents + 2) // 4, (exponents + 3) // 4):
        t = t * ((part.clamp(-1022, 1023) + 1023) << 52).view(torch.float64).view(
            -1, *[1] * (t.ndim - 1)
        )
    return t
