"""The heads of one attention layer at one batch of inputs, as tensors."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from lipbound.attention.cache import Cache, derived, memoised
from lipbound.attention.layer_norm import ResidualContext
from lipbound.attention.projections import Projections, projected
from lipbound.attention.scoring import Scoring, zero_one
from lipbound.attention.validation import validate
from lipbound.attention.variants import Variant, listed
from lipbound.attention.variants.base import SIDES, Side
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNorm, QKNormalised
from lipbound.attention.variants.rotary import Rotation
from lipbound.attention.variants.sinks import Sinks
from lipbound.attention.variants.token_maps import TokenMap
from lipbound.attention.variants.value_norm import ValueNorm
from lipbound.errors import AttentionError, is_number, knows_options, shown, tell
from lipbound.formatting import html_facts
from lipbound.schema import INPUT, MEMORY, QUERIES

PATTERN = ("wide_q", "q", "wide_k", "k", "centred_k", "p", "weights")
"""Tensors that are derived from queries and keys alone."""
WIDE = ("wide_q", "centred_k", "centred_v")
"""Tensors in float64 whatever the layer's dtype, and free of biases that J does not see."""


def in_float64(t: Tensor) -> Tensor:
    """Return a tensor of floating-point numbers in float64, and others as they are."""
    return t.double() if t.is_floating_point() else t


def centred(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return vectors (samples, ..., N, n) of tokens without their mean, padding left out."""
    if valid is None:
        return x - x.mean(-2, keepdim=True)
    real = valid.view(len(x), *(1,) * (x.ndim - 3), -1, 1)
    return x - (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


class Attention:
    r"""The heads of one attention layer at a batch of inputs.

    For sample :math:`X` (N x D) and a head with projections :math:`W_Q, W_K` (D x d), :math:`W_V`
    (D x d_v)::

        q = x @ w_q + b_q,  k = x @ w_k + b_k,  v = x @ w_v + b_v
        scores = scale * q @ k^T + mask,  p = softmax(scores),  out = p @ v

    Queries and keys may be normalised (``norm_q``, ``norm_k``) and then turned (``rotation``) after
    their projection, and values normalised (``norm_v``). Scores may be capped before the mask is
    added, ``cap * tanh(scores / cap)``, and a constant ``sinks[h]`` may take part in every softmax
    of head h as one more score, whose probability is dropped: rows of P then sum to less than one.

    Everything derived (``q, k, v, p, out``) is computed on first use and kept. `Attention.of` takes
    the same in groups, `Projections` and `Scoring`.

    All floating tensors but the mask must share one dtype, float32 or float64, which is the dtype
    of everything derived.

    Args:
        x: inputs of the layer, (samples, N, D).
        w_q, w_k: query and key projections, (heads, D, d). Grouped keys are repeated, one per head.
        w_v: value projection, (heads, D, d_v).
        b_q, b_k, b_v: biases, (heads, d), (heads, d), (heads, d_v), or None for no bias.
        w_o: each head's slice of the output projection, (heads, d_v, D_out), or None when it is not
            known.
        scale: factor of the scores; ``d ** -0.5`` when None.
        mask: additive mask, broadcastable to (samples, heads, N, N), entries finite or -inf;
            entries at or below -1e30 forbid attention.
        valid: (samples, N) bool; tokens that are False (padding) are dropped both as queries and as
            keys: their rows of ``x``, ``p`` and ``out`` are zero, and no quantity counts them.
        rotation: rotary position embedding of the N tokens, or None.
        norm_q, norm_k: normalisation of queries and of keys before the rotation, or None.
        norm_v: normalisation of values, or None.
        cap: scores are kept between -cap and cap, or None.
        sinks: (heads,), or None.
        steps: other variants (`lipbound.attention.variants`).
        surroundings: layer normalisation and residual connection around the layer, which only maps
            that include them look at.

    Raises:
        AttentionError: for shapes that do not fit, mixed or unsupported dtypes, NaN or infinite
            entries, or a query that may attend to no key.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(2, 5, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]
    >>> att = Attention(*(torch.randn(shape, generator=g) for shape in shapes))
    >>> att.p.shape, att.out.shape
    (torch.Size([2, 3, 5, 5]), torch.Size([2, 3, 5, 4]))
    """

    x: Tensor
    projections: Projections
    scoring: Scoring
    valid: Tensor | None
    surroundings: ResidualContext | None
    cache: Cache

    @knows_options
    def __init__(
        self,
        x: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        *,
        b_q: Tensor | None = None,
        b_k: Tensor | None = None,
        b_v: Tensor | None = None,
        w_o: Tensor | None = None,
        scale: float | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
        rotation: Rotation | None = None,
        norm_q: QKNorm | None = None,
        norm_k: QKNorm | None = None,
        norm_v: QKNorm | None = None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        steps: Sequence[Variant] = (),
        surroundings: ResidualContext | None = None,
    ):
        for name, number in (("scale", scale), ("cap", cap)):
            if number is not None and (isinstance(number, bool) or not is_number(number)):
                raise AttentionError(f"{name} is {shown(number)}; it must be a finite number")
        for name, given, kind, what in (
            ("norm_q", norm_q, QKNorm, "QKNorm of lipbound.attention.variants.qk_norm"),
            ("norm_k", norm_k, QKNorm, "QKNorm of lipbound.attention.variants.qk_norm"),
            ("norm_v", norm_v, QKNorm, "QKNorm of lipbound.attention.variants.qk_norm"),
            ("rotation", rotation, Rotation, "Rotation of lipbound.attention.variants.rotary"),
            ("sinks", sinks, Tensor, "torch tensor"),
        ):
            if given is not None and not isinstance(given, kind):
                raise AttentionError(f"{name} is {shown(given)}; it must be a {what}")
        found: list[Variant] = list(steps)
        if norm_q is not None or norm_k is not None:
            found.append(QKNormalised(norm_q, norm_k))
        found += [] if norm_v is None else [ValueNorm(norm_v)]
        found += [] if rotation is None else [rotation]
        found += [] if cap is None else [Cap(float(cap))]
        found += [] if sinks is None else [Sinks(sinks)]
        if isinstance(mask, Tensor) and mask.is_floating_point() and zero_one(mask):
            tell(
                "mask holds 0 and 1, which are added to the scores and forbid nothing; a mask "
                "has 0 where attention is allowed and -inf elsewhere"
            )
        projections = Projections(w_q, w_k, w_v, b_q, b_k, b_v, w_o)
        scoring = Scoring(None if scale is None else float(scale), mask, tuple(found))
        self._set(x, projections, scoring, valid, surroundings)

    @classmethod
    def of(
        cls,
        x: Tensor,
        projections: Projections,
        scoring: Scoring,
        *,
        valid: Tensor | None = None,
        surroundings: ResidualContext | None = None,
        check: bool = True,
    ) -> Self:
        """Return a layer made of its parts.

        Args:
            x: inputs of the layer, (samples, N, D).
            projections: weights and biases.
            scoring: how queries and keys become probabilities.
            valid, surroundings: as in the constructor.
            check: whether to look at the numbers, which parts of another layer do not need.
        """
        layer = cls.__new__(cls)
        layer._set(x, projections, scoring, valid, surroundings, check=check)
        return layer

    def _set(
        self,
        x: Tensor,
        projections: Projections,
        scoring: Scoring,
        valid: Tensor | None,
        surroundings: ResidualContext | None,
        *,
        check: bool = True,
    ) -> None:
        if check:
            validate(x, projections, scoring, valid)
        self.projections, self.scoring = projections, scoring
        self.valid, self.surroundings = valid, surroundings
        self.x = x if valid is None else torch.where(valid[..., None], x, torch.zeros_like(x))
        tensors = [self.x, *projections.tensors().values(), *scoring.inputs()]
        self.cache = Cache(differentiable=any(t.requires_grad for t in tensors))

    # -- parts -------------------------------------------------------------------------------------

    @property
    def w_q(self) -> Tensor:
        """Query projections, (heads, D, d)."""
        return self.projections.w_q

    @property
    def w_k(self) -> Tensor:
        """Key projections, (heads, D, d)."""
        return self.projections.w_k

    @property
    def w_v(self) -> Tensor:
        """Value projections, (heads, D, d_v)."""
        return self.projections.w_v

    @property
    def b_q(self) -> Tensor | None:
        """Query biases, (heads, d), or None."""
        return self.projections.b_q

    @property
    def b_k(self) -> Tensor | None:
        """Key biases, (heads, d), or None."""
        return self.projections.b_k

    @property
    def b_v(self) -> Tensor | None:
        """Value biases, (heads, d_v), or None."""
        return self.projections.b_v

    @property
    def w_o(self) -> Tensor | None:
        """Slices of the output projection, (heads, d_v, D_out), or None."""
        return self.projections.w_o

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.d**-0.5 if self.scoring.scale is None else self.scoring.scale

    @property
    def mask(self) -> Tensor | None:
        """Additive mask, broadcastable to (samples, heads, N, N), or None."""
        return self.scoring.mask

    @property
    def rotation(self) -> Rotation | None:
        """Rotary position embedding, or None."""
        return self.scoring.find(Rotation)

    @property
    def norm_q(self) -> QKNorm | None:
        """Normalisation of queries, or None."""
        norms = self.scoring.find(QKNormalised)
        return None if norms is None else norms.q

    @property
    def norm_k(self) -> QKNorm | None:
        """Normalisation of keys, or None."""
        norms = self.scoring.find(QKNormalised)
        return None if norms is None else norms.k

    @property
    def norm_v(self) -> QKNorm | None:
        """Normalisation of values, or None."""
        found = self.scoring.find(ValueNorm)
        return None if found is None else found.norm

    @property
    def cap(self) -> float | None:
        """Number that scores are kept below in absolute value, or None."""
        cap = self.scoring.find(Cap)
        return None if cap is None else cap.value

    @property
    def sinks(self) -> Tensor | None:
        """Sink logits, (heads,), or None."""
        sinks = self.scoring.find(Sinks)
        return None if sinks is None else sinks.logits

    @property
    def variants(self) -> frozenset[str]:
        """Names of the variants that this layer has (`lipbound.attention.variants`)."""
        return self.scoring.names

    def only(self, what: str, allowed: Collection[str] = ()) -> None:
        """Check that ``what`` covers the layer.

        Raises:
            AttentionError: the layer has variants besides those that are ``allowed``.
        """
        other = [step.title for step in self.scoring.listed() if step.name not in allowed]
        if other:
            covering = "exact norms of heads, 'lipbound' and 'lipbound_block'"
            raise AttentionError(f"{what} does not cover {listed(other)}; {covering} do")

    @property
    def other_stream(self) -> OtherStream | None:
        """Queries, or keys and values, of other tokens than ``x`` (cross-attention), or None."""
        return self.scoring.find(OtherStream)

    @property
    def kind(self) -> str:
        """The kind of attention: "self", or "cross" where one side is of another stream."""
        return "self" if self.other_stream is None else "cross"

    @property
    def perturbed(self) -> str:
        """Stream that ``x`` is: "input" of self-, "queries" or "memory" of cross-attention."""
        if self.other_stream is None:
            return INPUT
        return MEMORY if self.values_move else QUERIES

    @property
    def values_move(self) -> bool:
        """False if keys and values are of another stream: an output follows its own token alone."""
        other = self.other_stream
        return other is None or other.v is None

    @property
    def rows(self) -> int:
        """Number of queries, and of outputs of a head: N, but for the memory of cross-attention."""
        other = self.other_stream
        return self.tokens if other is None or other.q is None else other.tokens

    @property
    def keys(self) -> int:
        """Number of keys: N, but for the queries of cross-attention."""
        other = self.other_stream
        return self.tokens if other is None or other.k is None else other.tokens

    @property
    def valid_rows(self) -> Tensor | None:
        """Queries that are not padding, (samples, rows) bool, or None for all."""
        other = self.other_stream
        return self.valid if other is None or other.q is None else other.valid

    @property
    def valid_keys(self) -> Tensor | None:
        """Keys that are not padding, (samples, keys) bool, or None for all."""
        other = self.other_stream
        return self.valid if other is None or other.k is None else other.valid

    @property
    def samples(self) -> int:
        """Number of inputs."""
        return self.x.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.w_q.shape[0]

    @property
    def tokens(self) -> int:
        """Length N of the inputs, padding included."""
        return self.x.shape[1]

    @property
    def d(self) -> int:
        """Width of queries and keys."""
        return self.w_q.shape[2]

    @property
    def d_v(self) -> int:
        """Width of values and head outputs."""
        return self.w_v.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of inputs and weights, float32 or float64."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.x.device

    def _facts(self) -> tuple[dict[str, int], str, str]:
        """Return sizes by name, the names of optional parts, and the dtype."""
        sizes = {"samples": self.samples, "heads": self.heads, "N": self.tokens}
        sizes |= {"D": self.x.shape[2], "d": self.d, "d_v": self.d_v}
        optional = ("b_q", "b_k", "b_v", "w_o", "mask", "valid")
        extra = [name for name in optional if getattr(self, name) is not None]
        extra += [part for step in self.scoring.listed() for part in step.parts]
        return sizes, ", ".join(extra), str(self.dtype).removeprefix("torch.")

    def _repr_html_(self) -> str:
        sizes, extra, dtype = self._facts()
        names = {"N": "N (tokens)", "D": "D (width)"}
        said = {names.get(name, name): f"{size:,}" for name, size in sizes.items()}
        said |= {"scale": f"{float(self.scale):.6g}", "with": extra}
        return html_facts("Attention layer", said | {"dtype": dtype, "device": str(self.device)})

    def __repr__(self) -> str:
        sizes, extra, dtype = self._facts()
        said = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"Attention({said}, {dtype}{f', with {extra}' if extra else ''})"

    # -- derived tensors ---------------------------------------------------------------------------

    @derived
    def lengths(self) -> Tensor:
        """Number of tokens of each sample that are not padding, (samples,), in float64."""
        if self.valid is None:
            return torch.full((self.samples,), self.tokens, dtype=torch.float64, device=self.device)
        return self.valid.sum(-1).double()

    @memoised
    def projected(self, side: Side) -> Tensor:
        """Return queries, keys or values before any variant, (samples, heads, N, d), float64."""
        return projected(self.x, *self.projections.of(side))

    def passages(self, dtype: torch.dtype | None = None) -> dict[str, TokenMap]:
        """Return the derivatives of what happens to projected queries, keys and values.

        Of every head of every sample, with products in ``dtype``, by default the layer's own.
        """
        work = self.dtype if dtype is None else dtype

        def of(side: Side) -> TokenMap:
            return self.scoring.token_map(side, self.x, lambda: self.projected(side), work)

        return {side: of(side) for side in SIDES}

    @derived
    def wide_q(self) -> Tensor:
        """Queries as they enter the scores, in float64, (samples, heads, N, d)."""
        return self.scoring.enter("q", self.x, self.projected("q"), self.valid)

    @derived
    def q(self) -> Tensor:
        """Queries as they enter the scores, (samples, heads, N, d)."""
        return self.wide_q.to(self.dtype)

    @derived
    def wide_k(self) -> Tensor:
        """Keys as they enter the scores, in float64, (samples, heads, N, d)."""
        return self.scoring.enter("k", self.x, self.projected("k"), self.valid)

    @derived
    def k(self) -> Tensor:
        """Keys as they enter the scores, (samples, heads, N, d)."""
        return self.wide_k.to(self.dtype)

    @derived
    def v(self) -> Tensor:
        """Values, (samples, heads, N, d_v)."""
        return self.wide_v.to(self.dtype)

    @property
    def wide_v(self) -> Tensor:
        """Values in float64, (samples, heads, N, d_v)."""
        return self.scoring.enter("v", self.x, self.projected("v"), self.valid)

    @derived
    def centred_k(self) -> Tensor:
        """Keys without their mean over tokens, float64: Lemma 2 (docs/theory/jacobian.md).

        Attention, and its Jacobian, see only differences of keys, unless a variant of scores or
        softmax sees more: they are then left as they are.
        """
        if not self.scoring.shift_invariant:
            return self.wide_k
        if not self.scoring.plain("k"):
            return centred(self.wide_k, self.valid_keys)
        return self.centred(projected(self.centred(self.x.double()), self.w_k))

    @derived
    def centred_v(self) -> Tensor:
        """Values without bias and mean over tokens, float64: Lemma 2 (docs/theory/jacobian.md).

        The Jacobian sees only differences of values, unless something of value zero takes part in
        the softmax: they are then left as they are.
        """
        if self.scoring.extra_scores is not None:
            return self.wide_v
        if not self.scoring.plain("v"):
            return centred(self.wide_v, self.valid_keys)
        return self.centred(projected(self.centred(self.x.double()), self.w_v))

    def centred(self, x: Tensor) -> Tensor:
        """Return vectors (samples, ..., N, n) of tokens without their mean, padding left out.

        What tokens have in common would cost digits.
        """
        return centred(x, self.valid)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores of queries and keys as the softmax sees them, (samples, heads, N, N).

        They are -inf where mask or padding forbid attention.
        """
        return self.forbid(self.scoring.transformed(self.scale * (q @ k.mT)))

    @derived
    def weights(self) -> Tensor:
        """Weights of changes of q k^T, (samples, heads, N, N).

        P, times the slopes of the scores where they are not one.
        """
        if not self.scoring.sloped:
            return self.p
        slopes = self.scoring.slopes(self.scale * (self.wide_q @ self.centred_k.mT))
        return self.p if slopes is None else (self.p.double() * slopes).to(self.dtype)

    def forbid(self, scores: Tensor) -> Tensor:
        """Return ``scores`` plus the mask, -inf where attention is forbidden."""
        return self.scoring.forbid(scores, self.valid_keys)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the softmax over keys (and sinks), with the rows of padded queries zero."""
        return self.scoring.probabilities(scores, self.valid_rows)

    @derived
    def p(self) -> Tensor:
        """Attention probabilities, (samples, heads, N, N).

        Computed in float64 whatever the dtype, and from centred keys: scores of size s would
        otherwise carry an absolute error of s times the rounding unit into P.
        """
        return self.probabilities(self.scores(self.wide_q, self.centred_k)).to(self.dtype)

    @property
    def ungated(self) -> Tensor:
        """Averages P v of values, before a gate, (samples, heads, N, d_v)."""
        return self.p @ self.v

    @derived
    def out(self) -> Tensor:
        """Head outputs before the output projection, (samples, heads, N, d_v)."""
        gate = self.scoring.find(Gate)
        return self.ungated if gate is None else gate.apply(self.x, self.ungated)

    # -- copies, each a layer of its own with a cache of its own -----------------------------------

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
        """Return a layer with other parts; what is not named stays.

        Inputs and mask that stay are not looked at again.
        """
        own = self.projections if projections is None else projections
        if check and x is None and scoring is None and isinstance(valid, str):
            validate(self.x, own, replace(self.scoring, mask=None), self.valid)
            check = False
        return type(self).of(
            self.x if x is None else x,
            own,
            self.scoring if scoring is None else scoring,
            valid=self.valid if isinstance(valid, str) else valid,
            surroundings=self.surroundings if isinstance(surroundings, str) else surroundings,
            check=check,
        )

    def double(self) -> Self:
        """Return the same layer in float64 (itself when it already is), made once.

        The mask is the layer's own: it is added to float64 scores anyway.
        """
        return self if self.dtype == torch.float64 else self._in_float64()

    @memoised
    def _in_float64(self) -> Self:
        return self._map(in_float64, check=False, mask=False)

    def to(self, other: str | torch.device | torch.dtype) -> Self:
        """Return the same layer on another device, or in another floating-point dtype."""
        if isinstance(other, torch.dtype):
            return self._map(lambda t: t.to(other) if t.is_floating_point() else t)
        return self._map(lambda t: t.to(other))

    def detached(self) -> Self:
        """Return the same layer without derivatives, of copies of its tensors.

        This works for tensors that were made in inference mode, too.
        """
        return self._map(lambda t: t.detach().clone(), check=False)

    def _map(
        self, change: Callable[[Tensor], Tensor], *, check: bool = True, mask: bool = True
    ) -> Self:
        around = self.surroundings
        return self.with_parts(
            x=change(self.x),
            projections=self.projections.map(change),
            scoring=self.scoring.map(change, mask=mask),
            valid=None if self.valid is None else change(self.valid),
            surroundings=None if around is None else around.map(lambda norm: norm.map(change)),
            check=check,
        )

    def select(self, samples: slice = slice(None), heads: slice = slice(None)) -> Self:
        """Return some samples and heads of the layer, one of each at least."""
        x, projections, around = self.x[samples], self.projections.of_heads(heads), None
        if self.surroundings is not None:
            around = self.surroundings.map(lambda norm: norm.select(samples))
        return self.with_parts(
            x=x,
            projections=projections,
            scoring=self.scoring.select(samples, heads),
            valid=None if self.valid is None else self.valid[samples],
            surroundings=around,
            check=0 in (len(x), len(projections.w_q)),
        )

    def of_samples(self, samples: slice) -> Self:
        """Return the layer at some of its inputs, with what has been derived at all of them."""
        part = self.select(samples)
        part.cache.share(self.cache, *PATTERN, *WIDE, change=lambda t: t[samples])
        return part

    def unpadded(self, sample: int) -> Self:
        """Return one sample without its padding tokens: samples = 1 and no ``valid``."""
        one = slice(sample, sample + 1)
        x, scoring = self.x[one], self.scoring.select(one, slice(None))
        marks = self.valid, self.valid_rows, self.valid_keys
        if all(valid is None for valid in marks):
            return self.with_parts(x=x, scoring=scoring, surroundings=None, check=False)
        keep, rows, keys = (
            torch.ones(n, dtype=torch.bool, device=self.device) if valid is None else valid[sample]
            for valid, n in zip(marks, (self.tokens, self.rows, self.keys), strict=True)
        )
        scoring = scoring.of_tokens(keep, rows, keys)
        return self.with_parts(x=x[:, keep], scoring=scoring, valid=None, surroundings=None)

    def at(
        self,
        x: Tensor,
        *,
        mask: Tensor | Literal["same"] | None = "same",
        valid: Tensor | Literal["same"] | None = "same",
    ) -> Self:
        """Return the same layer at other inputs; differentiable in them.

        ``surroundings``, which hold inputs themselves, are dropped. Raises AttentionError for
        shapes that do not fit, or another dtype.

        Args:
            x: (samples, N, D), any number of samples, in the layer's dtype. A rotation fixes N, and
                another stream of several samples their number.
            mask, valid: of these inputs, as in the constructor; the layer's own by default, which
                must then fit x.
        """
        scoring = self.scoring if isinstance(mask, str) else replace(self.scoring, mask=mask)
        scoring = scoring.repeated(len(x))
        return self.with_parts(x=x, scoring=scoring, valid=valid, surroundings=None)

    def without_biases(self) -> Self:
        """Return the same layer without the biases of its projections.

        The shift of a normalisation of queries or keys, which is none of these, stays.
        """
        projections, scoring = self.projections.without_biases(), self.scoring.without_biases()
        return self.with_parts(projections=projections, scoring=scoring)

    def with_values(
        self, w_v: Tensor, b_v: Tensor | None, w_o: Tensor | None = None, *, check: bool = True
    ) -> Self:
        """Return the same attention pattern over other values and output projection.

        Queries, keys and probabilities already computed are shared. ``check``: whether to look at
        the numbers.
        """
        projections = replace(self.projections, w_v=w_v, b_v=b_v, w_o=w_o)
        other = self.with_parts(projections=projections, check=check)
        other.cache.share(self.cache, *PATTERN)
        return other

    def _with_step(self, step: Variant) -> Self:
        """Return the same attention pattern over values that another step makes."""
        projections, scoring = replace(self.projections, w_o=None), self.scoring.replaced(step)
        other = self.with_parts(projections=projections, scoring=scoring, check=False)
        other.cache.share(self.cache, *PATTERN)
        return other

    def fold_output(self) -> tuple[Self, Tensor]:
        """Return heads that have absorbed their output slice, of the same Jacobian norm.

        With E (D_out x r) of orthonormal columns that span its rows, by QR, ``w_o[h] = L E^T`` and
        the map ``x -> out @ w_o[h]`` has the singular values of the head whose value projection is
        ``w_v[h] @ L``: Lemma 4 (docs/theory/jacobian.md).

        Returns:
            That layer, and E as a tensor (heads, D_out, r), r = min(d_v, D_out).

        Raises:
            AttentionError: when ``w_o`` is not known, or narrower than normalised values.
        """
        own = self.projections
        if own.w_o is None:
            raise AttentionError(
                "map 'head_out' needs the output projection w_o, which this layer does not have; "
                "use map='head'"
            )
        e = torch.linalg.qr(own.w_o.detach().mT).Q  # a basis, which derivatives may take as fixed
        inner = own.w_o @ e
        step = self.scoring.find(Gate) or self.scoring.values_step
        if step is not None:
            if inner.shape[2] < self.d_v:
                raise AttentionError(
                    f"map 'head_out' of a layer with {step.title} needs an output at least "
                    f"{self.d_v} wide; it is {own.w_o.shape[2]} wide; use map='head'"
                )
            return self._with_step(step.followed_by(inner)), e
        b_v = None if own.b_v is None else (own.b_v[:, None] @ inner)[:, 0]
        return self.with_values(own.w_v @ inner, b_v), e
