"""Scores and their softmax: from queries and keys to probabilities, with masks and variants."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from lipbound.attention.variants import Variant
from lipbound.attention.variants.base import Side
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.sinks import Sinks
from lipbound.attention.variants.token_maps import TokenMap, TokenStep
from lipbound.errors import AttentionError

V = TypeVar("V", bound=Variant)
EVERY = slice(None)
BLOCKED = -1e30
"""Additive mask entries at or below this value forbid attention (models write the dtype's lowest
number, or -inf)."""


def zero_one(mask: Tensor) -> bool:
    """Return whether a mask holds both 0 and 1, and nothing else.

    It was hardly meant to be added to scores.

    >>> zero_one(torch.ones(2, 2).tril()), zero_one(torch.zeros(2, 2))
    (True, False)
    """
    zero, one = mask == 0, mask == 1
    return bool((zero | one).all()) and bool(one.any()) and bool(zero.any())


def add_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Return ``scores`` plus an additive mask of theirs, -inf where it forbids attention."""
    return (scores + mask).masked_fill(mask <= BLOCKED, -math.inf)


def level(mask: Tensor) -> Tensor:
    """Return a mask, float64, less the largest entry of each row.

    The softmax sees only differences, and large constants would swallow digits of scores.
    """
    forbidden = mask <= BLOCKED
    mask = mask.double().masked_fill(forbidden, -math.inf)
    top = mask.amax(-1, keepdim=True)
    return mask - torch.where(torch.isfinite(top), top, 0.0)


def four_axes(mask: Tensor) -> Tensor:
    """Return a mask as (samples or 1, heads or 1, N or 1, N or 1)."""
    return mask[(None,) * (4 - mask.ndim)]


@dataclass(frozen=True, eq=False)
class Scoring:
    """Steps from projected queries and keys to probabilities.

    Args:
        scale: factor of the scores; ``d ** -0.5`` of the layer when None.
        mask: additive, broadcastable to (samples, heads, N, N), entries finite or -inf, or None;
            entries at or below -1e30 forbid attention.
        steps: the variants, in any order; they act in that of their stages.

    Raises:
        AttentionError: a scale that is no number, two variants of one name.
    """

    scale: float | None = None
    mask: Tensor | None = None
    steps: tuple[Variant, ...] = ()

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise AttentionError(f"scale is {self.scale}; it must be a finite number")
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise AttentionError(f"variants {names} were given, one of them twice; give each once")
        if {"gate", "cross"} <= set(names):
            raise AttentionError("gated outputs of cross-attention have no closed form here")
        object.__setattr__(self, "steps", tuple(sorted(self.steps, key=lambda step: step.order)))

    def inputs(self) -> list[Tensor]:
        """Return all tensors that it is made of."""
        own = [] if self.mask is None else [self.mask]
        return own + [t for step in self.steps for t in step.inputs()]

    # -- what the variants are ---------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Names of the variants."""
        return frozenset(step.name for step in self.steps)

    def listed(self) -> list[Variant]:
        """Return the variants in the order in which lists have them."""
        return sorted(self.steps, key=lambda step: step.place)

    def find(self, kind: type[V]) -> V | None:
        """Return the variant of a class, or None."""
        return next((step for step in self.steps if isinstance(step, kind)), None)

    @property
    def values_step(self) -> Variant | None:
        """The variant that makes values, or None where they are projections of the inputs."""
        return next((step for step in self.steps if step.linear()), None)

    def replaced(self, step: Variant) -> "Scoring":
        """Return the same with another variant in the place of that of its name."""
        return replace(self, steps=tuple(step if s.name == step.name else s for s in self.steps))

    @property
    def shift_invariant(self) -> bool:
        """True if a vector added to all keys changes nothing."""
        return all(step.shift_invariant for step in self.steps)

    def plain(self, side: Side) -> bool:
        """Return whether no variant acts on queries, keys or values.

        Biases of keys then shift every row of scores by a constant, and those of values outputs.
        """
        return not any(step.acts_on(side) for step in self.steps)

    # -- queries, keys and values ------------------------------------------------------------------

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Return projected queries, keys or values (samples, heads, N, d) as they are used."""
        for step in self.steps:
            y = step.enter(side, x, y, valid)
        return y

    def token_map(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> TokenMap:
        """Return the derivative of `enter` with respect to the projected vectors y().

        Of every head of every sample, token by token.
        """
        found: list[TokenStep] = []
        for step in self.steps:
            if (one := step.step(side, x, y, dtype)) is not None:
                found.append(one)
            y = partial(self._entered, step, side, x, y)
        return TokenMap(found, x.shape[1], dtype, x.device)

    @staticmethod
    def _entered(step: Variant, side: Side, x: Tensor, y: Callable[[], Tensor]) -> Tensor:
        return step.enter(side, x, y(), None)

    # -- scores ------------------------------------------------------------------------------------

    def transformed(self, z: Tensor) -> Tensor:
        """Return scaled scores z, in any shape, as they are before the mask."""
        for step in self.steps:
            z = step.scores(z)
        return z

    def slopes(self, z: Tensor) -> Tensor | None:
        """Return the derivative of `transformed` entry by entry; None where it is one."""
        total = None
        last = max((i for i, step in enumerate(self.steps) if step.sloped), default=-1)
        for i, step in enumerate(self.steps[: last + 1]):
            slope = step.slopes(z)
            total = slope if total is None else total if slope is None else total * slope
            z = step.scores(z) if i < last else z
        return total

    @property
    def sloped(self) -> bool:
        """True if `slopes` may be other than one."""
        return any(step.sloped for step in self.steps)

    @cached_property
    def level_mask(self) -> Tensor | None:
        """The mask as it is added to scores: without what each row has in common.

        Whole where constants take part in the softmax beside it.
        """
        return level(self.mask) if self.mask is not None and self._levelled else self.mask

    @property
    def _levelled(self) -> bool:
        return self.mask is not None and not (
            self.mask.requires_grad or self.extra_scores is not None or self.mask.shape[-1] == 1
        )

    def mask_part(self, sample: int, head: int, rows: slice, keys: slice = EVERY) -> Tensor | None:
        """Return some rows and columns of `level_mask` of one head, without forming the rest.

        (rows or 1, keys or 1), or None where there is no mask; ``keys`` are to hold all that
        ``rows`` may attend to.
        """
        if self.mask is None:
            return None
        mask = four_axes(self.mask)
        mask = mask[min(sample, mask.shape[0] - 1), min(head, mask.shape[1] - 1)]
        mask = mask[rows] if mask.shape[0] > 1 else mask
        mask = mask[:, keys] if mask.shape[1] > 1 else mask
        return level(mask) if self._levelled else mask

    def forbid(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Return scores (samples, heads, N, N) plus the mask, -inf where it forbids attention.

        ``valid``: which keys are not padding.
        """
        if self.level_mask is not None:
            scores = add_mask(scores, self.level_mask)
        return scores if valid is None else scores.masked_fill(~valid[:, None, None, :], -math.inf)

    # -- the softmax -------------------------------------------------------------------------------

    @property
    def extra_scores(self) -> Tensor | None:
        """Scores (heads, 1) whose probabilities are dropped, or None."""
        sinks = self.find(Sinks)
        return None if sinks is None else sinks.logits[:, None]

    def probabilities(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Return the softmax over keys and what else takes part, rows of padded queries zero.

        ``valid``: which queries are not padding.

        Raises:
            AttentionError: scores overflow.
        """
        padded = None if valid is None else ~valid[:, None, :, None]
        scores = scores if padded is None else scores.masked_fill(padded, 0.0)
        extra = self.extra_scores
        if extra is not None:
            columns = extra.to(scores.dtype)[:, None].expand(*scores.shape[:-1], -1)
            p = torch.softmax(torch.cat([scores, columns], -1), -1)[..., : scores.shape[-1]]
        else:
            p = torch.softmax(scores, -1)
        p = p if padded is None else p.masked_fill(padded, 0.0)
        if not bool(torch.isfinite(p).all()):
            raise AttentionError(
                "the attention scores overflow, so their softmax is not finite; rescale the "
                "inputs or the weights"
            )
        return p

    # -- copies ------------------------------------------------------------------------------------

    def _changed(self, mask: Tensor | None, change: Callable[[Variant], Variant]) -> "Scoring":
        return replace(self, mask=mask, steps=tuple(map(change, self.steps)))

    def select(self, samples: slice, heads: slice) -> "Scoring":
        """Return that of some samples and heads."""
        mask = self.mask
        if mask is not None:
            mask = four_axes(mask)
            mask = mask[samples] if mask.shape[0] > 1 else mask
            mask = mask[:, heads] if mask.shape[1] > 1 else mask
        return self._changed(mask, lambda step: step.of_heads(heads).of_samples(samples))

    def of_tokens(self, keep: Tensor, rows: Tensor, keys: Tensor) -> "Scoring":
        """Return that of some of the tokens, of one sample.

        Args:
            keep: which tokens of the inputs, (N,) bool.
            rows, keys: which queries, and which keys: the same but for cross-attention.
        """
        mask = self.mask
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], len(rows), len(keys))[..., rows, :][..., keys]
        other = self.find(OtherStream)
        own = self if other is None else self.replaced(other.unpadded())
        return own._changed(mask, lambda step: step.of_tokens(keep))

    def repeated(self, samples: int) -> "Scoring":
        """Return that of one sample for so many."""
        other = self.find(OtherStream)
        return self if other is None else self.replaced(other.repeated(samples))

    def without_biases(self) -> "Scoring":
        """Return that for projections without biases.

        The shift of a normalisation of queries or keys, which is none of these, stays.
        """
        return self._changed(self.mask, lambda step: step.without_biases())

    def map(self, change: Callable[[Tensor], Tensor], *, mask: bool = True) -> "Scoring":
        """Return the same with changed tensors; the mask stays where ``mask`` is False."""
        changed = change(self.mask) if mask and self.mask is not None else self.mask
        return self._changed(changed, lambda step: step.map(change))
