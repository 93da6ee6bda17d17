"""The heads of one attention layer at one batch of inputs, as tensors."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lipbound.attention.qk_norm import QKNorm
from lipbound.attention.residual import ResidualContext
from lipbound.attention.rotary import Rotation
from lipbound.attention.token_maps import TokenMap
from lipbound.attention.validation import BLOCKED, TENSORS, validate
from lipbound.attention.variants import VARIANTS, cap_slope
from lipbound.errors import AttentionError

T = TypeVar("T")


FIELDS = (*TENSORS, "scale", "valid", "rotation", "norm_q", "norm_k", "cap", "surroundings")


class Attention:
    r"""The heads of one self-attention layer at a batch of inputs.

    For sample :math:`X` (N x D) and a head with projections :math:`W_Q, W_K` (D x d), :math:`W_V` (D x d_v)::

        q = x @ w_q + b_q,  k = x @ w_k + b_k,  v = x @ w_v + b_v
        scores = scale * q @ k^T + mask,  p = softmax(scores),  out = p @ v

    Queries and keys may be normalised (``norm_q``, ``norm_k``) and then turned (``rotation``) after their projection, scores capped before the
    mask is added, ``cap * tanh(scores / cap)``, and a constant ``sinks[h]`` may take part in every softmax of head h as one more score, whose
    probability is dropped: rows of P then sum to less than one.

    Everything derived (``q, k, v, p, out``) is computed on first use and kept.

    Args:
        x: inputs of the layer, (samples, N, D).
        w_q, w_k: query and key projections, (heads, D, d). Grouped keys are repeated, one per head.
        w_v: value projection, (heads, D, d_v).
        b_q, b_k, b_v: biases, (heads, d), (heads, d), (heads, d_v), or None for no bias.
        w_o: each head's slice of the output projection, (heads, d_v, D_out), or None when it is not known.
        scale: factor of the scores; ``d ** -0.5`` when None.
        mask: additive mask, broadcastable to (samples, heads, N, N), entries finite or -inf; entries at or below -1e30
            forbid attention.
        valid: (samples, N) bool; tokens that are False (padding) are dropped both as queries and as keys: their rows of
            ``x``, ``p`` and ``out`` are zero, and no quantity counts them.
        rotation: rotary position embedding of the N tokens, or None.
        norm_q, norm_k: normalisation of queries and of keys before the rotation, or None.
        cap: scores are kept between -cap and cap, or None.
        sinks: (heads,), or None.
        surroundings: layer normalisation and residual connection around the layer, which only maps that include them look at.

    All floating tensors must share one dtype, float32 or float64, which is the dtype of everything derived.

    Raises:
        AttentionError: for shapes that do not fit, mixed or unsupported dtypes, NaN or infinite entries, or a query
            that may attend to no key.

    >>> import torch
    >>> g = torch.Generator().manual_seed(0)
    >>> att = Attention(*(torch.randn(s, generator=g) for s in [(2, 5, 8), (3, 8, 4), (3, 8, 4), (3, 8, 4)]))
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
        surroundings: ResidualContext | None = None,
    ):
        self.x, self.w_q, self.w_k, self.w_v = x, w_q, w_k, w_v
        self.b_q, self.b_k, self.b_v, self.w_o = b_q, b_k, b_v, w_o
        self.mask, self.valid, self.rotation, self.surroundings = mask, valid, rotation, surroundings
        self.norm_q, self.norm_k, self.cap, self.sinks = norm_q, norm_k, None if cap is None else float(cap), sinks
        validate(self)
        self.scale = self.d**-0.5 if scale is None else float(scale)
        if not math.isfinite(self.scale):
            raise AttentionError(f"scale is {self.scale}; it must be a finite number")
        if valid is not None:
            self.x = torch.where(valid[..., None], x, torch.zeros_like(x))
        self.remembered: dict[Any, Any] = {}

    # -- shapes ------------------------------------------------------------------------------------------------------

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
        """float32 or float64."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.x.device

    @cached_property
    def lengths(self) -> Tensor:
        """Number of tokens of each sample that are not padding, (samples,), in float64."""
        if self.valid is None:
            return torch.full((self.samples,), self.tokens, dtype=torch.float64, device=self.device)
        return self.valid.sum(-1).double()

    def __repr__(self) -> str:
        names = ("b_q", "b_k", "b_v", "w_o", "mask", "valid", "rotation", "norm_q", "norm_k", "cap", "sinks")
        extra = [name for name in names if getattr(self, name) is not None]
        return (
            f"Attention(samples={self.samples}, heads={self.heads}, N={self.tokens}, D={self.x.shape[2]}, d={self.d}, "
            f"d_v={self.d_v}, {str(self.dtype).removeprefix('torch.')}{', with ' + ', '.join(extra) if extra else ''})"
        )

    # -- derived tensors ---------------------------------------------------------------------------------------------

    def _project(self, w: Tensor, b: Tensor | None = None) -> Tensor:
        return projected(self.x, w, b)

    def _passed(self, y: Tensor, norm: QKNorm | None) -> Tensor:
        """Projected queries or keys after normalisation and rotation."""
        if norm is not None:
            if norm.undefined(self.x, y, self.valid):
                raise AttentionError("a query or key of length zero is normalised without eps, which is not defined; give an eps")
            y = norm.apply(self.x, y)
        return y if self.rotation is None else self.rotation.turn(y)

    def passages(self, dtype: torch.dtype | None = None) -> tuple[TokenMap, TokenMap]:
        """The derivative of what happens to queries, and to keys, between projection and scores; of every head of every sample."""
        sides = ((self.w_q, self.b_q, self.norm_q), (self.w_k, self.b_k, self.norm_k))
        q, k = (
            TokenMap(self.rotation, norm, self.x, w if norm is None else self._project(w, b), self.dtype if dtype is None else dtype)
            for w, b, norm in sides
        )
        return q, k

    @property
    def variants(self) -> frozenset[str]:
        """Which of `VARIANTS` this layer has."""
        there = {
            "rotation": self.rotation is not None,
            "qk_norm": self.norm_q is not None or self.norm_k is not None,
            "cap": self.cap is not None,
            "sinks": self.sinks is not None,
        }
        return frozenset(name for name, has in there.items() if has)

    @property
    def shift_invariant(self) -> bool:
        """Whether a vector added to all keys changes nothing (no cap, no sinks)."""
        return self.cap is None and self.sinks is None

    def only(self, what: str, allowed: Collection[str] = ()) -> None:
        """Raise AttentionError if the layer has variants that ``what`` does not cover."""
        other = [VARIANTS[name] for name in VARIANTS if name in self.variants - set(allowed)]
        if other:
            covering = "exact norms of heads, 'lipbound', 'lipbound_block' and 'lipbound_gram'"
            raise AttentionError(f"{what} does not cover {' and '.join(other)}; {covering} do")

    @cached_property
    def wide_q(self) -> Tensor:
        """Queries as they enter the scores, in float64, (samples, heads, N, d)."""
        return self._passed(self._project(self.w_q, self.b_q), self.norm_q)

    @cached_property
    def q(self) -> Tensor:
        """Queries as they enter the scores, (samples, heads, N, d)."""
        return self.wide_q.to(self.dtype)

    @cached_property
    def wide_k(self) -> Tensor:
        """Keys as they enter the scores, in float64, (samples, heads, N, d)."""
        return self._passed(self._project(self.w_k, self.b_k), self.norm_k)

    @cached_property
    def k(self) -> Tensor:
        """Keys as they enter the scores, (samples, heads, N, d)."""
        return self.wide_k.to(self.dtype)

    @cached_property
    def v(self) -> Tensor:
        """Values, (samples, heads, N, d_v)."""
        return self._project(self.w_v, self.b_v).to(self.dtype)

    @cached_property
    def centred_k(self) -> Tensor:
        """Keys without their mean over tokens, float64; left as they are where scores are capped or there are sinks.

        Otherwise attention, and its Jacobian, see only differences of keys: Lemma 2 (docs/theory/jacobian.md)."""
        if not self.shift_invariant:
            return self.wide_k
        k = self._project(self.w_k) if self.rotation is None and self.norm_k is None else self.wide_k
        return k - k.mean(-2, keepdim=True)

    @cached_property
    def centred_v(self) -> Tensor:
        """Values without bias and without their mean over tokens, float64; left as they are where there are sinks, whose value is zero.

        Otherwise the Jacobian sees only differences of values: Lemma 2 (docs/theory/jacobian.md)."""
        if self.sinks is not None:
            return self._project(self.w_v, self.b_v)
        v = self._project(self.w_v)
        return v - v.mean(-2, keepdim=True)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """What the softmax sees, (samples, heads, N, N): the one place where queries and keys meet.

        Entries that the mask or padding forbid are -inf.
        """
        z = self.scale * (q @ k.mT)
        return self.forbid(z if self.cap is None else self.cap * torch.tanh(z / self.cap))

    def slopes(self, q: Tensor, k: Tensor) -> Tensor:
        """Derivative of capped scores with respect to those before the cap, (..., N, N), for queries and keys as they enter them."""
        assert self.cap is not None
        return cap_slope(self.scale * (q @ k.mT) / self.cap)

    @cached_property
    def weights(self) -> Tensor:
        """What changes of q k^T are weighted with, (samples, heads, N, N): P, times the slope of the cap where there is one."""
        if self.cap is None:
            return self.p
        return (self.p.double() * self.slopes(self.wide_q, self.wide_k)).to(self.dtype)

    @staticmethod
    def add_mask(scores: Tensor, mask: Tensor) -> Tensor:
        """``scores`` plus an additive mask of theirs, -inf where it forbids attention."""
        return (scores + mask).masked_fill(mask <= BLOCKED, -math.inf)

    def forbid(self, scores: Tensor) -> Tensor:
        """``scores`` plus the mask, -inf where attention is forbidden."""
        if self.mask is not None:
            scores = self.add_mask(scores, self.mask)
        if self.valid is not None:
            scores = scores.masked_fill(~self.valid[:, None, None, :], -math.inf)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Softmax over keys (and the sink), with the rows of padded queries zero; raises AttentionError when scores overflow."""
        padded = None if self.valid is None else ~self.valid[:, None, :, None]
        scores = scores if padded is None else scores.masked_fill(padded, 0.0)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            p = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            p = torch.softmax(scores, -1)
        p = p if padded is None else p.masked_fill(padded, 0.0)
        if not bool(torch.isfinite(p).all()):
            raise AttentionError("the attention scores overflow, so their softmax is not finite; rescale the inputs or the weights")
        return p

    @cached_property
    def p(self) -> Tensor:
        """Attention probabilities, (samples, heads, N, N).

        Computed in float64 whatever the dtype, and from centred keys: scores of size s would otherwise carry an absolute error of s times the
        rounding unit into P.
        """
        return self.probabilities(self.scores(self.wide_q, self.centred_k)).to(self.dtype)

    @cached_property
    def out(self) -> Tensor:
        """Head outputs before the output projection, (samples, heads, N, d_v)."""
        return self.p @ self.v

    # -- derived attentions ------------------------------------------------------------------------------------------

    def double(self) -> "Attention":
        """The same layer in float64 (self when it already is)."""
        return self if self.dtype == torch.float64 else self._map(lambda t: t.double() if t.is_floating_point() else t)

    def to(self, device: str | torch.device) -> "Attention":
        """The same layer on another device."""
        return self._map(lambda t: t.to(device))

    def select(self, samples: slice = slice(None), heads: slice = slice(None)) -> "Attention":
        """Some samples and heads of the layer."""

        def part(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[heads]

        mask = self.mask
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask[samples] if mask.shape[0] > 1 else mask
            mask = mask[:, heads] if mask.shape[1] > 1 else mask
        return self._changed(
            x=self.x[samples], w_q=self.w_q[heads], w_k=self.w_k[heads], w_v=self.w_v[heads],
            b_q=part(self.b_q), b_k=part(self.b_k), b_v=part(self.b_v), w_o=part(self.w_o), sinks=part(self.sinks),
            mask=mask, valid=None if self.valid is None else self.valid[samples],
            norm_q=None if self.norm_q is None else self.norm_q.select(heads),
            norm_k=None if self.norm_k is None else self.norm_k.select(heads),
            surroundings=None if self.surroundings is None else self.surroundings.map(lambda norm: norm.select(samples)),
        )  # fmt: skip

    def unpadded(self, sample: int) -> "Attention":
        """One sample without its padding tokens: samples = 1 and no ``valid``."""
        part = self.select(slice(sample, sample + 1))
        if self.valid is None:
            return part
        keep = self.valid[sample]
        mask = part.mask
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], self.tokens, self.tokens)[..., keep, :][..., keep]
        rotation = None if self.rotation is None else self.rotation.select(keep)
        return part._changed(x=part.x[:, keep], mask=mask, valid=None, rotation=rotation, surroundings=None)

    def at(self, x: Tensor, *, mask: Tensor | Literal["same"] | None = "same", valid: Tensor | Literal["same"] | None = "same") -> "Attention":
        """The same layer, with everything that makes it one, at other inputs; differentiable in them.

        Args:
            x: (samples, N, D), any number of samples, in the layer's dtype. A rotation fixes N.
            mask, valid: of these inputs, as in the constructor; the layer's own by default, which must then fit x. ``surroundings``, which hold
                inputs themselves, are dropped.

        Raises:
            AttentionError: shapes that do not fit, another dtype.
        """
        own: dict[str, Any] = {"mask": mask, "valid": valid}
        return self._changed(x=x, surroundings=None, **{name: value for name, value in own.items() if not isinstance(value, str)})

    def without_biases(self) -> "Attention":
        """The same layer without the biases of its projections; the shift of a normalisation of queries or keys, which is none of these, stays."""
        norms = {
            name: replace(norm, over=(norm.over[0], None))
            for name in ("norm_q", "norm_k")
            if (norm := getattr(self, name)) is not None and norm.over is not None
        }
        return self._changed(b_q=None, b_k=None, b_v=None, **norms)

    def fold_output(self) -> tuple["Attention", Tensor]:
        """Heads with their output slice, as plain heads of the same Jacobian norm.

        With the thin QR of the transpose, ``w_o[h] = L E^T`` (E: D_out x r with orthonormal columns), the map
        ``x -> out @ w_o[h]`` has the singular values of the head whose value projection is ``w_v[h] @ L``: Lemma 4 (docs/theory/jacobian.md).

        Returns:
            That layer, and E as a tensor (heads, D_out, r), r = min(d_v, D_out).

        Raises:
            AttentionError: when ``w_o`` is not known.
        """
        if self.w_o is None:
            raise AttentionError("map 'head_out' needs the output projection w_o, which this layer does not have; use map='head'")
        e, r = torch.linalg.qr(self.w_o.mT)
        fold = r.mT
        return self.with_values(self.w_v @ fold, None if self.b_v is None else (self.b_v[:, None] @ fold)[:, 0]), e

    def with_values(self, w_v: Tensor, b_v: Tensor | None, w_o: Tensor | None = None) -> "Attention":
        """The same attention pattern over other values and output projection; queries, keys and probabilities already computed are shared."""
        other = self._changed(w_v=w_v, b_v=b_v, w_o=w_o)
        for name in ("wide_q", "q", "wide_k", "k", "centred_k", "p", "weights"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def unit_values(self, *, together: bool = False) -> tuple["Attention", Tensor]:
        """The layer with each head's values (or all heads' ``together``) divided by a power of two near their size, and these numbers (heads,).

        Exact, and keeps products away from overflow and underflow; J is linear in the values: Lemma 4 (docs/theory/jacobian.md).
        """
        size = self.w_v.detach().abs().amax((-1, -2)).double()
        if together:
            size = size.amax().expand(self.heads)
        unit = torch.where(size > 0, 2.0 ** size.clamp_min(1e-300).log2().round(), 1.0)
        w_v = (self.w_v.double() / unit[:, None, None]).to(self.dtype)
        b_v = None if self.b_v is None else (self.b_v.double() / unit[:, None]).to(self.dtype)
        other = self.with_values(w_v, b_v, self.w_o)
        other.__dict__["centred_v"] = self.centred_v / unit[:, None, None]
        return other, unit

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """``make()``, computed once for this attention: bounds share their ingredients through it."""
        if key not in self.remembered:
            self.remembered[key] = make()
        value: T = self.remembered[key]
        return value

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Attention":
        tensors = {name: None if (t := getattr(self, name)) is None else change(t) for name in (*TENSORS, "valid")}
        norms = {name: None if (norm := getattr(self, name)) is None else norm.map(change) for name in ("norm_q", "norm_k")}
        around = None if self.surroundings is None else self.surroundings.map(lambda norm: norm.map(change))
        rotation = None if self.rotation is None else self.rotation.to(tensors["x"].device)  # type: ignore[union-attr]
        return self._changed(**tensors, **norms, rotation=rotation, surroundings=around)

    def _changed(self, **changes: Any) -> "Attention":
        """A layer with other tensors or parts; what is not named stays."""
        return Attention(**{name: getattr(self, name) for name in FIELDS} | changes)


def projected(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Tokens (samples, N, D) by per-head weights (heads, D, d) and biases, (samples, heads, N, d), in float64.

    Cancellations within a projection would otherwise cost digits of everything after it.
    """
    y = torch.einsum("snd,hde->shne", x.double(), w.double())
    return y if b is None else y + b[:, None]
