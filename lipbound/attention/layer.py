"""The heads of one attention layer at one batch of inputs, as tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from lipbound.attention.cache import Cache, derived
from lipbound.attention.masking import zero_one
from lipbound.attention.projections import Projections, projected
from lipbound.attention.residual import ResidualContext
from lipbound.attention.scoring import Scoring
from lipbound.attention.transforms import Transforms
from lipbound.attention.validation import validate
from lipbound.attention.variants import Variant
from lipbound.attention.variants.base import Side
from lipbound.attention.variants.cap import Cap
from lipbound.attention.variants.qk_norm import QKNorm, QKNormalised
from lipbound.attention.variants.rotary import Rotation
from lipbound.attention.variants.sinks import Sinks
from lipbound.attention.variants.token_maps import TokenMap
from lipbound.errors import AttentionError, is_number, shown, tell
from lipbound.formatting.html import html_facts


class Attention(Transforms):
    r"""The heads of one self-attention layer at a batch of inputs.

    For sample :math:`X` (N x D) and a head with projections :math:`W_Q, W_K` (D x d), :math:`W_V`
    (D x d_v)::

        q = x @ w_q + b_q,  k = x @ w_k + b_k,  v = x @ w_v + b_v
        scores = scale * q @ k^T + mask,  p = softmax(scores),  out = p @ v

    Queries and keys may be normalised (``norm_q``, ``norm_k``) and then turned (``rotation``) after
    their projection, scores capped before the mask is added, ``cap * tanh(scores / cap)``, and a
    constant ``sinks[h]`` may take part in every softmax of head h as one more score, whose
    probability is dropped: rows of P then sum to less than one.

    Everything derived (``q, k, v, p, out``) is computed on first use and kept.

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
        cap: scores are kept between -cap and cap, or None.
        sinks: (heads,), or None.
        steps: other variants (`lipbound.attention.variants`).
        surroundings: layer normalisation and residual connection around the layer, which only maps
            that include them look at.

    `Attention.of` takes the same in groups, `Projections` and `Scoring`.

    All floating tensors but the mask must share one dtype, float32 or float64, which is the dtype
    of everything derived.

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
        cap: float | None = None,
        sinks: Tensor | None = None,
        steps: Sequence[Variant] = (),
        surroundings: ResidualContext | None = None,
    ):
        for name, number in (("scale", scale), ("cap", cap)):
            if number is not None and (isinstance(number, bool) or not is_number(number)):
                raise AttentionError(f"{name} is {shown(number)}; it must be a finite number")
        for name, norm in (("norm_q", norm_q), ("norm_k", norm_k)):
            if norm is not None and not isinstance(norm, QKNorm):
                raise AttentionError(
                    f"{name} is {shown(norm)}; it must be a QKNorm of "
                    "lipbound.attention.variants.qk_norm"
                )
        if rotation is not None and not isinstance(rotation, Rotation):
            raise AttentionError(
                f"rotation is {shown(rotation)}; it must be a Rotation of "
                "lipbound.attention.variants.rotary"
            )
        if sinks is not None and not isinstance(sinks, Tensor):
            raise AttentionError(f"sinks is {shown(sinks)}; it must be a torch tensor")
        found: list[Variant] = list(steps)
        if norm_q is not None or norm_k is not None:
            found.append(QKNormalised(norm_q, norm_k))
        found += [] if rotation is None else [rotation]
        found += [] if cap is None else [Cap(float(cap))]
        found += [] if sinks is None else [Sinks(sinks)]
        projections = Projections(w_q, w_k, w_v, b_q, b_k, b_v, w_o)
        if isinstance(mask, Tensor) and mask.is_floating_point() and zero_one(mask):
            tell(
                "mask holds 0 and 1, which are added to the scores and forbid nothing; a mask "
                "has 0 where attention is allowed and -inf elsewhere"
            )
        self._set(
            x,
            projections,
            Scoring(None if scale is None else float(scale), mask, tuple(found)),
            valid,
            surroundings,
        )

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
        """A layer of its parts: inputs (samples, N, D), projections, and how queries and keys
        become probabilities; the rest as above.

        ``check``: whether to look at the numbers, which parts of another layer do not need.
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
        self.projections, self.scoring, self.valid, self.surroundings = (
            projections,
            scoring,
            valid,
            surroundings,
        )
        self.x = x if valid is None else torch.where(valid[..., None], x, torch.zeros_like(x))
        tensors = [self.x, *projections.tensors().values(), *scoring.inputs()]
        self.cache = Cache(differentiable=any(t.requires_grad for t in tensors))

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
        """A layer with other parts; what is not named stays, and is not looked at again if that is
        the mask and what it is a mask of."""
        if check and x is None and scoring is None and isinstance(valid, str):
            known = replace(self.scoring, mask=None)
            validate(
                self.x, self.projections if projections is None else projections, known, self.valid
            )
            check = False
        return type(self).of(
            self.x if x is None else x,
            self.projections if projections is None else projections,
            self.scoring if scoring is None else scoring,
            valid=self.valid if isinstance(valid, str) else valid,
            surroundings=self.surroundings if isinstance(surroundings, str) else surroundings,
            check=check,
        )

    # -- derived tensors ---------------------------------------------------------------------------

    @derived
    def lengths(self) -> Tensor:
        """Number of tokens of each sample that are not padding, (samples,), in float64."""
        if self.valid is None:
            return torch.full((self.samples,), self.tokens, dtype=torch.float64, device=self.device)
        return self.valid.sum(-1).double()

    def _extra(self) -> list[str]:
        """Names of the optional parts that there are."""
        extra = [
            name
            for name in ("b_q", "b_k", "b_v", "w_o", "mask", "valid")
            if getattr(self, name) is not None
        ]
        return extra + [
            part
            for step in sorted(self.scoring.steps, key=lambda step: step.place)
            for part in step.parts
        ]

    def _repr_html_(self) -> str:
        sizes = {
            "samples": self.samples,
            "heads": self.heads,
            "N (tokens)": self.tokens,
            "D (width)": self.x.shape[2],
            "d": self.d,
            "d_v": self.d_v,
        }
        said = {name: f"{size:,}" for name, size in sizes.items()} | {
            "scale": f"{float(self.scale):.6g}",
            "with": ", ".join(self._extra()),
        }
        return html_facts(
            "Attention layer",
            said | {"dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device)},
        )

    def __repr__(self) -> str:
        extra = self._extra()
        return (
            f"Attention(samples={self.samples}, heads={self.heads}, N={self.tokens}, "
            f"D={self.x.shape[2]}, d={self.d}, "
            f"d_v={self.d_v}, "
            f"{str(self.dtype).removeprefix('torch.')}"
            f"{', with ' + ', '.join(extra) if extra else ''})"
        )

    def projected(self, side: Side) -> Tensor:
        """Queries or keys as they are projected, before any variant, (samples, heads, N, d),
        float64."""
        return (
            projected(self.x, self.w_q, self.b_q)
            if side == "q"
            else projected(self.x, self.w_k, self.b_k)
        )

    def passages(self, dtype: torch.dtype | None = None) -> tuple[TokenMap, TokenMap]:
        """The derivative of what happens to queries, and to keys, between projection and scores; of
        every head of every sample."""
        work = self.dtype if dtype is None else dtype
        return (
            self.scoring.token_map("q", self.x, lambda: self.projected("q"), work),
            self.scoring.token_map("k", self.x, lambda: self.projected("k"), work),
        )

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
        return projected(self.x, self.w_v, self.b_v).to(self.dtype)

    @derived
    def centred_k(self) -> Tensor:
        """Keys without their mean over tokens, float64; left as they are where a variant of scores
        or softmax sees more than differences of keys.

        Otherwise attention, and its Jacobian, see only such differences: Lemma 2
        (docs/theory/jacobian.md).
        """
        if not self.scoring.shift_invariant:
            return self.wide_k
        return self.centred(
            projected(self.centred(self.x.double()), self.w_k)
            if self.scoring.plain_keys
            else self.wide_k
        )

    @derived
    def centred_v(self) -> Tensor:
        """Values without bias and without their mean over tokens, float64; left as they are where
        something of value zero takes part in the softmax.

        Otherwise the Jacobian sees only differences of values: Lemma 2 (docs/theory/jacobian.md).
        """
        if self.scoring.extra_scores is not None:
            return projected(self.x, self.w_v, self.b_v)
        return self.centred(projected(self.centred(self.x.double()), self.w_v))

    def centred(self, x: Tensor) -> Tensor:
        """Vectors (samples, ..., N, n) of tokens without the mean of those that are not padding:
        what they have in common would cost digits."""
        if self.valid is None:
            return x - x.mean(-2, keepdim=True)
        real = self.valid.view(self.samples, *(1,) * (x.ndim - 3), self.tokens, 1)
        return x - (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """What the softmax sees, (samples, heads, N, N), of queries and keys as they enter the
        scores; -inf where mask or padding forbid it."""
        return self.forbid(self.scoring.transformed(self.scale * (q @ k.mT)))

    def slopes(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Derivative of `scores` with respect to scale q k^T, entry by entry, (..., N, N); None
        where it is one."""
        return self.scoring.slopes(self.scale * (q @ k.mT))

    @derived
    def weights(self) -> Tensor:
        """What changes of q k^T are weighted with, (samples, heads, N, N): P, times the slopes of
        the scores where they are not one."""
        slopes = self.slopes(self.wide_q, self.centred_k) if self.scoring.sloped else None
        return self.p if slopes is None else (self.p.double() * slopes).to(self.dtype)

    def forbid(self, scores: Tensor) -> Tensor:
        """``scores`` plus the mask, -inf where attention is forbidden."""
        return self.scoring.forbid(scores, self.valid)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax over keys (and sinks), with the rows of padded queries zero; raises
        AttentionError when scores overflow."""
        return self.scoring.probabilities(scores, self.valid)

    @derived
    def p(self) -> Tensor:
        """Attention probabilities, (samples, heads, N, N).

        Computed in float64 whatever the dtype, and from centred keys: scores of size s would
        otherwise carry an absolute error of s times the rounding unit into P.
        """
        return self.probabilities(self.scores(self.wide_q, self.centred_k)).to(self.dtype)

    @derived
    def out(self) -> Tensor:
        """Head outputs before the output projection, (samples, heads, N, d_v)."""
        return self.p @ self.v
