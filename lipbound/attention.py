"""The heads of one attention layer at one batch of inputs, as tensors."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lipbound.errors import AttentionError
from lipbound.normalisation import Surroundings
from lipbound.rotation import Rotation

T = TypeVar("T")
BLOCKED = -1e30
"""Additive mask entries at or below this value forbid attention (models write the dtype's lowest number, or -inf)."""


class Attention:
    r"""The heads of one self-attention layer at a batch of inputs.

    For sample :math:`X` (N x D) and a head with projections :math:`W_Q, W_K` (D x d), :math:`W_V` (D x d_v)::

        q = x @ w_q + b_q,  k = x @ w_k + b_k,  v = x @ w_v + b_v
        scores = scale * q @ k^T + mask,  p = softmax(scores),  out = p @ v

    With a ``rotation`` every token's query and key pass through its linear map first (`lipbound.rotation`).

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
        surroundings: Surroundings | None = None,
    ):
        self.x, self.w_q, self.w_k, self.w_v = x, w_q, w_k, w_v
        self.b_q, self.b_k, self.b_v, self.w_o = b_q, b_k, b_v, w_o
        self.mask, self.valid, self.rotation, self.surroundings = mask, valid, rotation, surroundings
        self._check()
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
        extra = [name for name in ("b_q", "b_k", "b_v", "w_o", "mask", "valid", "rotation") if getattr(self, name) is not None]
        return (
            f"Attention(samples={self.samples}, heads={self.heads}, N={self.tokens}, D={self.x.shape[2]}, d={self.d}, "
            f"d_v={self.d_v}, {str(self.dtype).removeprefix('torch.')}{', with ' + ', '.join(extra) if extra else ''})"
        )

    # -- derived tensors ---------------------------------------------------------------------------------------------

    def _project(self, w: Tensor, b: Tensor | None = None) -> Tensor:
        """In float64: cancellations within a projection would otherwise cost digits of everything after it."""
        y = torch.einsum("snd,hde->shne", self.x.double(), w.double())
        return y if b is None else y + b[:, None]

    def _turned(self, y: Tensor) -> Tensor:
        """Queries or keys after the rotation."""
        return y if self.rotation is None else self.rotation.turn(y)

    def refuse_rotation(self, what: str) -> None:
        """Raise AttentionError if there is a rotation, which ``what`` does not know of."""
        if self.rotation is not None:
            raise AttentionError(f"{what} does not support rotary position embeddings; exact norms by 'lanczos', 'lipbound' and 'lipbound_block' do")

    @cached_property
    def wide_q(self) -> Tensor:
        """Queries in float64, rotated where there is a rotation, (samples, heads, N, d)."""
        return self._turned(self._project(self.w_q, self.b_q))

    @cached_property
    def q(self) -> Tensor:
        """Queries, (samples, heads, N, d)."""
        return self.wide_q.to(self.dtype)

    @cached_property
    def k(self) -> Tensor:
        """Keys, (samples, heads, N, d)."""
        return self._turned(self._project(self.w_k, self.b_k)).to(self.dtype)

    @cached_property
    def v(self) -> Tensor:
        """Values, (samples, heads, N, d_v)."""
        return self._project(self.w_v, self.b_v).to(self.dtype)

    @cached_property
    def centred_k(self) -> Tensor:
        """Keys without their mean over tokens, float64: attention, and its Jacobian, see only differences of keys (as they enter the scores: a
        bias drops out, unless tokens turn it)."""
        k = self._project(self.w_k) if self.rotation is None else self._turned(self._project(self.w_k, self.b_k))
        return k - k.mean(-2, keepdim=True)

    @cached_property
    def centred_v(self) -> Tensor:
        """Values without bias and without their mean over tokens, float64: the Jacobian sees only differences of values."""
        v = self._project(self.w_v)
        return v - v.mean(-2, keepdim=True)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """What the softmax sees, (samples, heads, N, N): the one place where queries and keys meet.

        Entries that the mask or padding forbid are -inf.
        """
        return self.forbid(self.scale * (q @ k.mT))

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
        """Softmax over keys, with the rows of padded queries zero; raises AttentionError when scores overflow."""
        if self.valid is None:
            p = torch.softmax(scores, -1)
        else:
            padded = ~self.valid[:, None, :, None]
            p = torch.softmax(scores.masked_fill(padded, 0.0), -1).masked_fill(padded, 0.0)
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
        return Attention(
            self.x[samples], self.w_q[heads], self.w_k[heads], self.w_v[heads],
            b_q=part(self.b_q), b_k=part(self.b_k), b_v=part(self.b_v), w_o=part(self.w_o),
            scale=self.scale, mask=mask, valid=None if self.valid is None else self.valid[samples], rotation=self.rotation,
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
        return Attention(
            part.x[:, keep], part.w_q, part.w_k, part.w_v, b_q=part.b_q, b_k=part.b_k, b_v=part.b_v, w_o=part.w_o, scale=self.scale, mask=mask,
            rotation=None if self.rotation is None else self.rotation.select(keep),
        )  # fmt: skip

    def fold_output(self) -> tuple["Attention", Tensor]:
        """Heads with their output slice, as plain heads of the same Jacobian norm.

        With the thin QR of the transpose, ``w_o[h] = L E^T`` (E: D_out x r with orthonormal columns), the map
        ``x -> out @ w_o[h]`` has the singular values of the head whose value projection is ``w_v[h] @ L``.

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
        other = Attention(
            self.x, self.w_q, self.w_k, w_v, b_q=self.b_q, b_k=self.b_k, b_v=b_v, w_o=w_o,
            scale=self.scale, mask=self.mask, valid=self.valid, rotation=self.rotation, surroundings=self.surroundings,
        )  # fmt: skip
        for name in ("wide_q", "q", "k", "centred_k", "p"):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def unit_values(self, *, together: bool = False) -> tuple["Attention", Tensor]:
        """The layer with each head's values (or all heads' ``together``) divided by a power of two near their size, and these numbers (heads,).

        Exact, since J is linear in the values; keeps products away from overflow and underflow.
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
        tensors = {
            name: None if (t := getattr(self, name)) is None else change(t)
            for name in ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "mask", "valid")
        }
        around = None if self.surroundings is None else self.surroundings.map(lambda norm: norm.map(change))
        rotation = None if self.rotation is None else self.rotation.to(tensors["x"].device)  # type: ignore[union-attr]
        return Attention(**tensors, scale=self.scale, rotation=rotation, surroundings=around)  # type: ignore[arg-type]

    # -- validation --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("x", "w_q", "w_k", "w_v")}
        for name, shape in shapes.items():
            axes = "(samples, N, D)" if name == "x" else "(heads, D, d)"
            if len(shape) != 3 or 0 in shape:
                raise AttentionError(f"{name} has shape {shape}; it must be {axes} with no empty axis")
        heads, _, d = shapes["w_q"]
        samples, tokens, model = shapes["x"]
        d_v = shapes["w_v"][2]
        expected: dict[str, tuple[int | None, ...]] = {
            "w_q": (heads, model, d), "w_k": (heads, model, d), "w_v": (heads, model, d_v),
            "b_q": (heads, d), "b_k": (heads, d), "b_v": (heads, d_v), "w_o": (heads, d_v, None), "valid": (samples, tokens),
        }  # fmt: skip
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            got = tuple(tensor.shape)
            if len(got) != len(shape) or any(b is not None and a != b for a, b in zip(got, shape, strict=True)):
                wanted = tuple("any" if s is None else s for s in shape)
                raise AttentionError(f"{name} has shape {got}; with x {shapes['x']} and w_q {shapes['w_q']} it must be {wanted}")
        self._check_values()
        if self.rotation is not None and (self.rotation.tokens != tokens or self.rotation.width > d):
            raise AttentionError(
                f"rotation is of {self.rotation.tokens} tokens and turns {self.rotation.width} coordinates; with x {shapes['x']} and w_q "
                f"{shapes['w_q']} it must be of {tokens} tokens and turn at most {d}"
            )
        if self.mask is not None:
            try:
                full = torch.broadcast_shapes(self.mask.shape, (samples, heads, tokens, tokens))
            except RuntimeError:
                full = None
            if full != (samples, heads, tokens, tokens):
                raise AttentionError(
                    f"mask has shape {tuple(self.mask.shape)}; it must be broadcastable to (samples, heads, N, N) = "
                    f"{(samples, heads, tokens, tokens)}"
                )
        self._check_reachable()

    def _check_values(self) -> None:
        if self.valid is not None and self.valid.dtype != torch.bool:
            raise AttentionError(f"valid has dtype {self.valid.dtype}; it must be torch.bool")
        for name in ("x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "mask"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype not in (torch.float32, torch.float64):
                raise AttentionError(f"{name} has dtype {tensor.dtype}; attention is computed in torch.float32 or torch.float64")
            if tensor.dtype != self.x.dtype:
                raise AttentionError(f"{name} has dtype {tensor.dtype} but x has {self.x.dtype}; give all tensors one dtype")
            if name == "mask":
                if bool(torch.isnan(tensor).any()) or bool((tensor == math.inf).any()):
                    raise AttentionError("mask has NaN or +inf entries; it must be finite, or -inf where attention is forbidden")
                continue
            counted = tensor[self.valid] if name == "x" and self.valid is not None else tensor
            if not bool(torch.isfinite(counted).all()):
                raise AttentionError(f"{name} has NaN or infinite entries; the Jacobian is not defined there")

    def _check_reachable(self) -> None:
        """Every query that counts must see at least one key."""
        if self.valid is not None and not bool(self.valid.any(-1).all()):
            raise AttentionError("valid marks every token of a sample as padding; each sample needs at least one token")
        if self.mask is None:
            return
        tokens = self.x.shape[1]
        keys = (self.mask > BLOCKED).expand(*self.mask.shape[:-2], *torch.broadcast_shapes(self.mask.shape[-2:], (1, tokens)))
        if self.valid is not None:
            keys = keys & self.valid[:, None, None, :]
        sees = keys.any(-1)
        if self.valid is not None:
            sees = sees | ~self.valid[:, None, :]
        if not bool(sees.all()):
            raise AttentionError("mask forbids some query every key, so its softmax is undefined; mark such tokens with valid=False")
