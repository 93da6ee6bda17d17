"""The heads of one attention layer at one batch of inputs, as tensors."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from lipbound.attention import scoring
from lipbound.attention.cache import Cache, derived, keep_result, memoised
from lipbound.attention.layer_norm import ResidualContext
from lipbound.attention.validation import check_values, largest_entries, validate
from lipbound.attention.variants import VARIANTS, titles
from lipbound.attention.variants.base import SIDES, Side, TokenMap, TokenStep, cut, mapped, tensors
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import FixedStep, OtherStream
from lipbound.attention.variants.qk_norm import NormStep, QKNorm
from lipbound.attention.variants.rotary import Rotation
from lipbound.devices import in_own_modes
from lipbound.errors import AttentionError, choice, knows_options
from lipbound.formatting import html_facts
from lipbound.schema import INPUT, MEMORY, QUERIES, STATISTICS

_AXES = {
    "x": "sn.",
    **dict.fromkeys(("w_q", "w_k", "w_v"), "h.."),
    **dict.fromkeys(("b_q", "b_k", "b_v"), "h."),
    "w_o": "h..",
    "mask": "sh..",
    "valid": "sn",
    **dict.fromkeys(("rotation", "norm_q", "norm_k", "norm_v"), ""),
    "sinks": "h",
    **dict.fromkeys(("gate", "other_stream"), ""),
}
"""Parts of a layer that are tensors, or are made of them, and their axes
(`lipbound.attention.variants.base.NamedAxes`)."""
NUMBERS = ("scale", "norm_late", "cap", "surroundings")
"""The other parts."""
PATTERN = ("wide_q", "q", "wide_k", "k", "centred_k", "p", "weights")
"""Tensors that are derived from queries and keys alone."""
WIDE = ("wide_q", "centred_k", "centred_v")
"""Tensors in float64 whatever the layer's dtype, and free of biases that J does not see."""
EVERY = slice(None)


def centred(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return vectors (samples, ..., N, n) of tokens without their mean, padding left out.

    What tokens have in common would cost digits.
    """
    if valid is None:
        return x - x.mean(-2, keepdim=True)
    real = valid.view(len(x), *(1,) * (x.ndim - 3), -1, 1)
    return x - (x * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)


def projected(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Return tokens (samples, N, D) projected for each head, (samples, heads, N, d), in float64.

    Cancellations within a projection would otherwise cost digits of everything after it.

    Args:
        x: the tokens.
        w: weights, (heads, D, d).
        b: biases, (heads, d), or None.
    """
    y = torch.einsum("snd,hde->shne", x.double(), w.double())
    return y if b is None else y + b[:, None]


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

    Head outputs may be gated (``gate``). Everything derived (``q, k, v, p, out``) is computed on
    first use and kept.

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
        norm_late: whether they are normalised after the rotation instead (Hunyuan).
        norm_v: normalisation of values, or None.
        cap: scores are kept between -cap and cap (Gemma 2, 2024, section 2), or None.
        sinks: (heads,), or None (gpt-oss, 2025).
        gate: of head outputs, or None.
        other_stream: queries, or keys and values, of other tokens than ``x``, which do not move
            with them (cross-attention), or None.
        surroundings: layer normalisation and residual connection around the layer, which only maps
            that include them look at.
        check: False leaves out all checks, for parts of a layer that were checked.

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
        norm_late: bool = False,
        norm_v: QKNorm | None = None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        gate: Gate | None = None,
        other_stream: OtherStream | None = None,
        surroundings: ResidualContext | None = None,
        check: bool = True,
    ):
        self.x, self.w_q, self.w_k, self.w_v = x, w_q, w_k, w_v
        self.b_q, self.b_k, self.b_v, self.w_o = b_q, b_k, b_v, w_o
        self.mask, self.valid = mask, valid
        self.rotation, self.norm_q, self.norm_k, self.norm_v = rotation, norm_q, norm_k, norm_v
        self.norm_late, self.cap, self.sinks, self.gate = norm_late, cap, sinks, gate
        self.other_stream, self.surroundings = other_stream, surroundings
        if check:
            validate(self, scale)
        self.scale = self.d**-0.5 if scale is None else float(scale)
        self.cap = None if cap is None else float(cap)
        if valid is not None:
            self.x = torch.where(valid[..., None], x, torch.zeros_like(x))
        self.cache = Cache(differentiable=any(t.requires_grad for t in self.tensors().values()))
        if check:
            check_values(self)
        self._fit = check and self._scores_fit()

    # -- parts -------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the layer is made of, by name, as "w_q" or "norm_q.gain"."""
        return {key: t for name in _AXES for key, t in tensors(name, getattr(self, name)).items()}

    def projection(self, side: Side) -> tuple[Tensor, Tensor | None]:
        """Return the weights and the bias of queries, keys or values."""
        return getattr(self, f"w_{side}"), getattr(self, f"b_{side}")

    @property
    def variants(self) -> frozenset[str]:
        """Names of what the layer has of `lipbound.attention.variants.VARIANTS`."""
        norm = self.norm_k if self.norm_q is None else self.norm_q
        parts = (self.rotation, norm, self.cap, self.sinks, self.norm_v, self.other_stream)
        named = zip(VARIANTS, (*parts, self.gate), strict=True)
        return frozenset(name for name, part in named if part is not None)

    def only(self, what: str, allowed: Collection[str] = ()) -> None:
        """Check that ``what`` covers the layer.

        Raises:
            AttentionError: the layer has variants besides those that are ``allowed``.
        """
        if others := self.variants - set(allowed):
            covering = "exact norms of heads, 'lipbound' and 'lipbound_block'"
            raise AttentionError(f"{what} does not cover {titles(others)}; {covering} do")

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

    def fixed(self, side: Side) -> Tensor | None:
        """Return queries, keys or values of another stream, (heads, samples, M, d), or None."""
        return None if self.other_stream is None else getattr(self.other_stream, side)

    @property
    def values_move(self) -> bool:
        """False if keys and values are of another stream: an output follows its own token alone."""
        return self.fixed("v") is None

    def _stream(self, side: Side) -> "Attention | OtherStream":
        """The tokens that queries, or keys and values, are computed from."""
        other = self.other_stream
        return self if other is None or self.fixed(side) is None else other

    @property
    def rows(self) -> int:
        """Number of queries, and of outputs of a head: N, but for the memory of cross-attention."""
        return self._stream("q").tokens

    @property
    def keys(self) -> int:
        """Number of keys: N, but for the queries of cross-attention."""
        return self._stream("k").tokens

    @property
    def valid_rows(self) -> Tensor | None:
        """Queries that are not padding, (samples, rows) bool, or None for all."""
        return self._stream("q").valid

    @property
    def valid_keys(self) -> Tensor | None:
        """Keys that are not padding, (samples, keys) bool, or None for all."""
        return self._stream("k").valid

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
        needed = ("x", "w_q", "w_k", "w_v")
        extra = [a for a in (*_AXES, "cap") if a not in needed and getattr(self, a) is not None]
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

    # -- queries, keys and values ------------------------------------------------------------------

    @derived
    def lengths(self) -> Tensor:
        """Number of tokens of each sample that are not padding, (samples,), in float64."""
        if self.valid is None:
            return torch.full((self.samples,), self.tokens, dtype=torch.float64, device=self.device)
        return self.valid.sum(-1).double()

    @memoised
    def projected(self, side: Side) -> Tensor:
        """Return queries, keys or values before any variant, (samples, heads, N, d), float64."""
        return projected(self.x, *self.projection(side))

    def steps(self, side: Side) -> list[QKNorm | Rotation]:
        """Return what happens to projected queries, keys or values, in order."""
        norm: QKNorm | None = getattr(self, f"norm_{side}")
        turn = None if side == "v" else self.rotation
        steps = (turn, norm) if self.norm_late else (norm, turn)
        return [step for step in steps if step is not None]

    def plain(self, side: Side) -> bool:
        """Return whether queries, keys or values are projections of the inputs.

        Biases of keys then shift every row of scores by a constant, and those of values outputs.
        """
        return not self.steps(side) and self.fixed(side) is None

    @property
    def spans(self) -> list[Tensor]:
        """Projections (D, n) besides the heads' own through which inputs are felt, each once."""
        found: list[Tensor] = []
        for norm in (self.norm_q, self.norm_k, self.norm_v):
            if norm is not None and norm.over is not None:
                same = (t.shape == norm.over[0].shape and t.equal(norm.over[0]) for t in found)
                found += [] if any(same) else [norm.over[0]]
        return found

    def token_map(self, side: Side, dtype: torch.dtype | None = None) -> TokenMap:
        """Return the derivative of what happens to projected queries, keys or values.

        Of every head of every sample, with products in ``dtype``, by default the layer's own.
        """
        dtype, fixed = self.dtype if dtype is None else dtype, self.fixed(side)
        if fixed is not None:
            still = FixedStep(self.tokens, fixed.shape[2])
            return TokenMap([still], self.tokens, dtype, self.device)
        found: list[TokenStep] = []
        for step in self.steps(side):
            if isinstance(step, QKNorm):
                before = TokenMap(found, self.tokens, dtype, self.device)  # a rotation
                y = before.push(self.projected(side))
                found.append(NormStep.of(step, self.x, y, dtype))
            else:
                found.append(step)
        return TokenMap(found, self.tokens, dtype, self.device)

    def passages(self, dtype: torch.dtype | None = None) -> dict[str, TokenMap]:
        """Return `token_map` of queries, keys and values."""
        return {side: self.token_map(side, dtype) for side in SIDES}

    def _entered(self, side: Side) -> Tensor:
        """Queries, keys or values as they are used, in float64."""
        if (fixed := self.fixed(side)) is not None:
            return fixed.double().transpose(0, 1)
        y = self.projected(side)
        for step in self.steps(side):
            y = step.enter(self.x, y, self.valid)
        return y

    @derived
    def wide_q(self) -> Tensor:
        """Queries as they enter the scores, in float64, (samples, heads, N, d)."""
        return self._entered("q")

    @derived
    def q(self) -> Tensor:
        """Queries as they enter the scores, (samples, heads, N, d)."""
        return self.wide_q.to(self.dtype)

    @derived
    def wide_k(self) -> Tensor:
        """Keys as they enter the scores, in float64, (samples, heads, N, d)."""
        return self._entered("k")

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
        return self._entered("v")

    @property
    def shift_invariant(self) -> bool:
        """True if a vector added to all keys changes nothing."""
        return self.cap is None and self.sinks is None

    @derived
    def centred_k(self) -> Tensor:
        """Keys without their mean over tokens, float64: Lemma 2 (docs/theory/jacobian.md).

        Attention, and its Jacobian, see only differences of keys, unless scores are capped or sinks
        take part: they are then left as they are.
        """
        return self._differences("k") if self.shift_invariant else self.wide_k

    @derived
    def centred_v(self) -> Tensor:
        """Values without bias and mean over tokens, float64: Lemma 2 (docs/theory/jacobian.md).

        The Jacobian sees only differences of values, unless sinks, whose value is zero, take part:
        they are then left as they are.
        """
        return self._differences("v") if self.sinks is None else self.wide_v

    def _differences(self, side: Side) -> Tensor:
        if not self.plain(side):
            return centred(getattr(self, f"wide_{side}"), self.valid_keys)
        return centred(projected(self.centred_x, self.projection(side)[0]), self.valid)

    @derived
    def centred_x(self) -> Tensor:
        """Tokens without their mean, float64, (samples, N, D)."""
        return centred(self.x.double(), self.valid)

    # -- scores and probabilities ------------------------------------------------------------------

    def capped(self, z: Tensor) -> Tensor:
        """Return scaled scores z, in any shape, as they are before the mask."""
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)

    def slopes(self, z: Tensor) -> Tensor | None:
        """Return the derivative of `capped` entry by entry; None where it is one."""
        return None if self.cap is None else scoring.cap_slope(z / self.cap)

    @derived
    def level_mask(self) -> Tensor | None:
        """The mask as it is added to scores: without what each row has in common.

        Whole where constants take part in the softmax beside it.
        """
        return scoring.level(self.mask) if self.mask is not None and self._levelled else self.mask

    @property
    def _levelled(self) -> bool:
        if (mask := self.mask) is None or mask.requires_grad:
            return False
        return self.sinks is None and mask.shape[-1] > 1

    def mask_part(self, sample: int, head: int, rows: slice, keys: slice = EVERY) -> Tensor | None:
        """Return some rows and columns of `level_mask` of one head, without forming the rest.

        (rows or 1, keys or 1), or None where there is no mask; ``keys`` are to hold all that
        ``rows`` may attend to.
        """
        if self.mask is None:
            return None
        mask = scoring.four_axes(self.mask)
        mask = mask[min(sample, mask.shape[0] - 1), min(head, mask.shape[1] - 1)]
        mask = mask[rows] if mask.shape[0] > 1 else mask
        mask = mask[:, keys] if mask.shape[1] > 1 else mask
        return scoring.level(mask) if self._levelled else mask

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores of queries and keys as the softmax sees them, (samples, heads, N, N).

        They are -inf where mask or padding forbid attention.
        """
        return self.forbid(self.capped(self.scale * (q @ k.mT)))

    def forbid(self, scores: Tensor) -> Tensor:
        """Return ``scores`` plus the mask, -inf where attention is forbidden."""
        keys = self.valid_keys
        if self.level_mask is not None:
            scores = scoring.add_mask(scores, self.level_mask)
        return scores if keys is None else scores.masked_fill(~keys[:, None, None, :], -torch.inf)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the softmax over keys (and sinks), with the rows of padded queries zero."""
        return scoring.softmax(scores, self.sinks, self.valid_rows, check=not self._fit)

    def _scores_fit(self) -> bool:
        """Return whether scores cannot overflow, by a bound from the layer's largest entries."""
        if self.variants - {"rotation", "cap"} or (self.mask is not None and not self._levelled):
            return False
        sizes = {name: max(found) for name, found in largest_entries(self).items()}
        each = self.x.shape[2] * sizes["x"]
        q, k = (each * sizes[f"w_{side}"] + sizes.get(f"b_{side}", 0.0) for side in "qk")
        turn = 1.0 if self.rotation is None else self.rotation.norm
        return abs(self.scale) * self.d * q * k * turn**2 < 1e300

    @derived
    def p(self) -> Tensor:
        """Attention probabilities, (samples, heads, N, N).

        Computed in float64 whatever the dtype, and from centred keys: scores of size s would
        otherwise carry an absolute error of s times the rounding unit into P.
        """
        return self.probabilities(self.scores(self.wide_q, self.centred_k)).to(self.dtype)

    @derived
    def weights(self) -> Tensor:
        """Weights of changes of q k^T, (samples, heads, N, N).

        P, times the slopes of the scores where they are not one.
        """
        slopes = None
        if self.cap is not None:
            slopes = self.slopes(self.scale * (self.wide_q @ self.centred_k.mT))
        return self.p if slopes is None else (self.p.double() * slopes).to(self.dtype)

    @property
    def ungated(self) -> Tensor:
        """Averages P v of values, before a gate, (samples, heads, N, d_v)."""
        return self.p @ self.v

    @derived
    def out(self) -> Tensor:
        """Head outputs before the output projection, (samples, heads, N, d_v)."""
        return self.ungated if self.gate is None else self.gate.apply(self.x, self.ungated)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Scaled and capped scores before masks, float64, and where attention is forbidden, bool.

        (samples, heads, N, N); forbidden also for queries and keys that are padding.
        """
        rows = self.valid_rows
        logits = self.capped(self.scale * (self.wide_q @ self.wide_k.mT)).double()
        hidden = torch.isneginf(self.forbid(torch.zeros_like(logits)))
        return logits, hidden if rows is None else hidden | ~rows[:, None, :, None]

    @in_own_modes
    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """Return what is watched in training beside norms, by the names in `STATISTICS`.

        ``largest_logit`` is the largest score of a query and a key that may attend to each other,
        scaled and capped, before masks and position biases are added and before the softmax; it
        grows without limit where training diverges (Dehghani et al. 2023, on scaling vision
        transformers). ``entropy`` is that of the attention of a query over keys, in nats, mean over
        queries (Zhai et al. 2023, on entropy collapse). ``first_token`` is the attention on the
        first key, mean over queries (Xiao et al. 2024, on attention sinks). Padding does not count.

        Returns:
            (samples, heads) each, float64.
        """
        p, rows, keys = self.p.double(), self.valid_rows, self.valid_keys
        logits, hidden = self.logits()
        logit = logits.masked_fill(hidden, -torch.inf).amax((-1, -2))
        first = p[..., 0]
        if keys is not None:
            place = keys.int().argmax(-1)  # the first that is no padding
            first = p.gather(-1, place.view(-1, 1, 1, 1).expand(*p.shape[:3], 1))[..., 0]
        shares = torch.ones_like(first[:, :1]) if rows is None else rows[:, None].double()
        entropy = torch.special.entr(p).sum(-1)
        # means over queries; rows of padding are zero
        entropy, first = ((t * shares).sum(-1) / shares.sum(-1) for t in (entropy, first))
        return dict(zip(STATISTICS, (logit, entropy, first), strict=True))

    # -- copies, each a layer of its own with a cache of its own -----------------------------------

    def with_parts(self, *, check: bool = True, **parts: Any) -> Self:
        """Return a layer with other parts, named as in the constructor; what is not named stays."""
        own = {name: getattr(self, name) for name in (*_AXES, *NUMBERS)}
        return type(self)(**own | parts, check=check)

    def _changed(self, change: Callable[[Tensor, str], Tensor], **others: Any) -> Self:
        axes = (_AXES | {"surroundings": ""}).items()
        own = {a: mapped(getattr(self, a), at, change) for a, at in axes if a not in others}
        found = self.with_parts(**own, **others, check=False)
        found._fit = self._fit
        return found

    @memoised
    def double(self) -> Self:
        """Return the same layer in float64 (itself when it already is), made once.

        The mask is the layer's own: it is added to float64 scores anyway; and so is the rotation,
        which turns float64 vectors.
        """
        if self.dtype == torch.float64:
            return self
        own = {"mask": self.mask, "rotation": self.rotation}
        wide = self._map(lambda t: t.double() if t.is_floating_point() else t, **own)
        keep_result(largest_entries, wide, largest_entries(self))
        return wide

    def to(self, other: str | torch.device | torch.dtype) -> Self:
        """Return the same layer on another device, or in another floating-point dtype."""
        numbers = isinstance(other, torch.dtype)
        found = self._map(lambda t: t if numbers and not t.is_floating_point() else t.to(other))
        check_values(found)
        return found

    def detached(self) -> Self:
        """Return the same layer without derivatives, of copies of its tensors.

        This works for tensors that were made in inference mode, too.
        """
        return self._map(lambda t: t.detach().clone())

    def _map(self, change: Callable[[Tensor], Tensor], **others: Any) -> Self:
        return self._changed(lambda t, _: change(t), **others)

    def select(self, samples: slice = EVERY, heads: slice = EVERY) -> Self:
        """Return some samples and heads of the layer.

        Raises:
            AttentionError: there is none of these.
        """
        for what, chosen, count in (("sample", samples, self.samples), ("head", heads, self.heads)):
            if not range(count)[chosen]:
                raise AttentionError(f"{chosen} selects no {what} of {count}; select at least one")
        return self._changed(partial(cut, s=samples, b=samples, h=heads))  # b of normalisers

    def of_samples(self, samples: slice) -> Self:
        """Return the layer at some of its inputs, with what has been derived at all of them."""
        part = self.select(samples)
        part.cache.share(self.cache, *PATTERN, *WIDE, change=lambda t: t[samples])
        return part

    def unpadded(self, sample: int) -> Self:
        """Return one sample without its padding tokens: samples = 1 and no ``valid``."""
        one = self.with_parts(surroundings=None, check=False).select(slice(sample, sample + 1))
        if one.valid_rows is None and one.valid_keys is None:
            return one
        every = (one.valid, one.tokens), (one.valid_rows, one.rows), (one.valid_keys, one.keys)
        keep, rows, keys = (
            torch.arange(n, device=self.device) if valid is None else valid[0].nonzero()[:, 0]
            for valid, n in every
        )
        mask, other = one.mask, one.other_stream
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], one.rows, one.keys)[..., rows, :][..., keys]
        other = None if other is None else other.unpadded()
        return one._changed(partial(cut, n=keep), mask=mask, other_stream=other, valid=None)

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
        other = None if self.other_stream is None else self.other_stream.repeated(len(x))
        parts = {"mask": mask, "valid": valid}
        own: dict[str, Any] = {name: t for name, t in parts.items() if not isinstance(t, str)}
        return self.with_parts(x=x, **own, other_stream=other, surroundings=None)

    def without_biases(self) -> Self:
        """Return the same layer without the biases of its projections.

        The shift of a normalisation of queries or keys, which is none of these, stays.
        """
        own: dict[str, Any] = {"b_q": None, "b_k": None, "b_v": None}
        for name in ("norm_q", "norm_k", "norm_v"):
            norm = getattr(self, name)
            if norm is not None and norm.over is not None:
                own[name] = replace(norm, over=(norm.over[0], None))
        gate = None if self.gate is None else replace(self.gate, b=None)
        return self.with_parts(**own, gate=gate, check=False)

    def over_values(self, parts: dict[str, Any], *, look_at: Collection[str] = ()) -> Self:
        """Return the same attention pattern with other parts, by name, of what makes values.

        ``look_at``: names of tensors whose numbers are checked.
        """
        other = self.with_parts(**parts, check=False)
        other._fit = self._fit
        check_values(other, look_at)
        other.cache.share(self.cache, *PATTERN, "level_mask")
        return other

    def output_projection(self, map: str, instead: str) -> Tensor:
        """Return ``w_o``, which a map needs.

        Raises:
            AttentionError: it is not known; ``instead`` is a map that needs none.
        """
        if self.w_o is None:
            raise AttentionError(
                f"map {map!r} needs the output projection w_o, which this layer does not have; use "
                f"map={instead!r}"
            )
        return self.w_o

    def fold_output(self) -> tuple[Self, Tensor]:
        """Return heads that have absorbed their output slice, of the same Jacobian norm.

        With E (D_out x r) of orthonormal columns that span its rows, by QR, ``w_o[h] = L E^T`` and
        the map ``x -> out @ w_o[h]`` has the singular values of the head whose value projection is
        ``w_v[h] @ L``: Lemma 4 (docs/theory/jacobian.md).

        Returns:
            That layer, and E as a tensor (heads, D_out, r), r = min(d_v, D_out).

        Raises:
            AttentionError: when ``w_o`` is not known, or narrower than values that are not
                projections, or gated.
        """
        w_o = self.output_projection("head_out", "head")
        # a basis, which derivatives may take as fixed; many take far longer on a GPU
        e = torch.linalg.qr(w_o.detach().cpu().mT).Q.to(w_o.device)
        inner = w_o @ e
        if self.gate is None and self.plain("v"):
            b_v = None if self.b_v is None else (self.b_v[:, None] @ inner)[:, 0]
            own = {"w_v": self.w_v @ inner, "b_v": b_v, "w_o": None}
            return self.over_values(own, look_at=own), e
        if inner.shape[2] < self.d_v:
            named = self.variants & {"gate", "value_norm", "cross"}
            raise AttentionError(
                f"map 'head_out' of a layer with {titles(named)} needs an output at least "
                f"{self.d_v} wide; it is {w_o.shape[2]} wide; use map='head'"
            )
        parts: dict[str, Any] = {"w_o": None}
        if self.other_stream is not None and (v := self.other_stream.v) is not None:
            parts["other_stream"] = replace(self.other_stream, v=v @ inner[:, None])
        else:
            name = "norm_v" if self.gate is None else "gate"
            step = getattr(self, name)
            after = inner if step.after is None else step.after @ inner
            parts[name] = replace(step, after=after)
        return self.over_values(parts), e


def cross_attention(
    x: Tensor,
    memory: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    stream: str,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    w_o: Tensor | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
    valid_memory: Tensor | None = None,
) -> Attention:
    r"""Return cross-attention as a function of one of its two streams of tokens.

    Queries are ``x @ w_q + b_q``, keys and values ``memory @ w_k + b_k`` and ``memory @ w_v +
    b_v``. The other stream is held: Lemma 17 (docs/theory/bounds.md).

    Args:
        x: tokens that queries are made of, (samples, N, D_x).
        memory: tokens that keys and values are made of, (samples, M, D_y).
        w_q: (heads, D_x, d).
        w_k: (heads, D_y, d).
        w_v: (heads, D_y, d_v).
        stream: which tokens move, "queries" or "memory"; the others are held.
        b_q, b_k, b_v: biases, (heads, d), (heads, d), (heads, d_v), or None.
        w_o: each head's slice of the output projection, (heads, d_v, D_out), or None.
        scale: factor of the scores; ``d ** -0.5`` when None.
        mask: additive, broadcastable to (samples, heads, N, M), as of `Attention`.
        valid: which tokens of x are not padding, (samples, N) bool, or None.
        valid_memory: the same of the memory, (samples, M) bool, or None.

    Returns:
        A layer whose inputs are that stream, in its dtype, float32 or float64.

    Raises:
        LipboundError: an unknown stream.
        AttentionError: tensors that do not fit, as of `Attention`.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> shapes = [(1, 3, 8), (1, 5, 6), (2, 8, 4), (2, 6, 4), (2, 6, 4)]
    >>> layer = cross_attention(*(torch.randn(s, generator=g) for s in shapes), stream="memory")
    >>> layer.p.shape, layer.perturbed
    (torch.Size([1, 2, 3, 5]), 'memory')
    """
    choice("stream", stream, (QUERIES, MEMORY))
    for name, t in (("x", x), ("memory", memory), ("w_q", w_q), ("w_k", w_k)):
        if not isinstance(t, Tensor) or t.ndim != 3:
            raise AttentionError(f"{name} must be a tensor with 3 axes")
    if w_q.shape[1] != x.shape[2] or w_k.shape[1] != memory.shape[2]:
        raise AttentionError(
            f"w_q {tuple(w_q.shape)} and w_k {tuple(w_k.shape)} do not fit x {tuple(x.shape)} and "
            f"memory {tuple(memory.shape)}; they must be (heads, D_x, d) and (heads, D_y, d)"
        )

    def made(tokens: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return projected(tokens, w, b).to(tokens.dtype).transpose(0, 1)

    if stream == MEMORY:
        other = OtherStream(q=made(x, w_q, b_q), valid=valid)
        own = {"w_q": torch.zeros_like(w_k), "w_k": w_k, "w_v": w_v, "b_k": b_k, "b_v": b_v}
        moving, real = memory, valid_memory
    else:
        other = OtherStream(k=made(memory, w_k, b_k), v=made(memory, w_v, b_v), valid=valid_memory)
        no_v = w_q.new_zeros(*w_q.shape[:2], w_v.shape[2])
        own = {"w_q": w_q, "w_k": torch.zeros_like(w_q), "w_v": no_v, "b_q": b_q}
        moving, real = x, valid
    own |= {"w_o": w_o, "mask": mask, "valid": real}
    return Attention(moving, scale=scale, other_stream=other, **own)  # type: ignore[arg-type]
