"""How queries and keys become probabilities: scale, variants, mask, softmax."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from lipbound.attention.masking import add_mask, among, four_axes, level, selected
from lipbound.attention.variants import Variant
from lipbound.attention.variants.base import Side
from lipbound.attention.variants.token_maps import TokenMap
from lipbound.errors import AttentionError

V = TypeVar("V", bound=Variant)
EVERY = slice(None)


@dataclass(frozen=True, eq=False)
class Scoring:
    """From projected queries and keys to probabilities.

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
        object.__setattr__(self, "steps", tuple(sorted(self.steps, key=lambda step: step.stage)))

    def inputs(self) -> list[Tensor]:
        """All tensors that it is made of."""
        return [
            *([] if self.mask is None else [self.mask]),
            *(t for step in self.steps for t in step.inputs()),
        ]

    # -- what the variants are ---------------------------------------------------------------------

    @property
    def names(self) -> frozenset[str]:
        """Names of the variants."""
        return frozenset(step.name for step in self.steps)

    def find(self, kind: type[V]) -> V | None:
        """The variant of a class, or None."""
        return next((step for step in self.steps if isinstance(step, kind)), None)

    @property
    def shift_invariant(self) -> bool:
        """Whether a vector added to all keys changes nothing."""
        return all(step.shift_invariant for step in self.steps)

    @property
    def plain_keys(self) -> bool:
        """Whether no variant acts on keys: their biases then shift every row of scores by a
        constant."""
        return not any(step.acts_on("k") for step in self.steps)

    # -- queries and keys --------------------------------------------------------------------------

    def enter(self, side: Side, x: Tensor, y: Tensor, valid: Tensor | None) -> Tensor:
        """Projected queries or keys (samples, heads, N, d), float64, as they enter the scores."""
        for step in self.steps:
            y = step.enter(side, x, y, valid)
        return y

    def token_map(
        self, side: Side, x: Tensor, y: Callable[[], Tensor], dtype: torch.dtype
    ) -> TokenMap:
        """The derivative of `enter` with respect to the projected vectors y(), of every head of
        every sample, token by token."""
        found = [step.step(side, x, y, dtype) for step in self.steps]
        return TokenMap([step for step in found if step is not None], x.shape[1], dtype, x.device)

    # -- scores ------------------------------------------------------------------------------------

    def transformed(self, z: Tensor, heads: slice | int = EVERY, rows: slice = EVERY) -> Tensor:
        """Scaled scores, (samples, heads, rows, N) or (rows, N) of one head, as they are before the
        mask."""
        for step in self.steps:
            z = step.scores(z, heads, rows)
        return z

    def slopes(self, z: Tensor, heads: slice | int = EVERY, rows: slice = EVERY) -> Tensor | None:
        """The derivative of `transformed` entry by entry; None where it is one."""
        total = None
        last = max((i for i, step in enumerate(self.steps) if step.sloped), default=-1)
        for i, step in enumerate(self.steps[: last + 1]):
            slope = step.slopes(z, heads, rows)
            total = slope if total is None else total if slope is None else total * slope
            z = step.scores(z, heads, rows) if i < last else z
        return total

    @property
    def sloped(self) -> bool:
        """Whether `slopes` may be other than one."""
        return any(step.sloped for step in self.steps)

    @property
    def entrywise(self) -> bool:
        """Whether every score passes by itself, so that those which a mask forbids need not be
        known."""
        return all(step.entrywise for step in self.steps)

    @cached_property
    def level_mask(self) -> Tensor | None:
        """The mask as it is added to scores: without what each row has in common, unless constants
        take part in the softmax beside it."""
        return level(self.mask) if self.mask is not None and self._levelled else self.mask

    @property
    def _levelled(self) -> bool:
        return self.mask is not None and not (
            self.mask.requires_grad or self.extra_scores is not None or self.mask.shape[-1] == 1
        )

    def mask_part(self, sample: int, head: int, rows: slice, keys: slice = EVERY) -> Tensor | None:
        """Some rows and columns of `level_mask` of one head, (rows or 1, keys or 1), without
        forming the rest; None where there is no mask.

        ``keys`` are to hold all that ``rows`` may attend to.
        """
        if self.mask is None:
            return None
        mask = four_axes(self.mask)
        mask = mask[min(sample, mask.shape[0] - 1), min(head, mask.shape[1] - 1)]
        mask = mask[rows] if mask.shape[0] > 1 else mask
        mask = mask[:, keys] if mask.shape[1] > 1 else mask
        return level(mask) if self._levelled else mask

    def forbid(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """``scores`` (samples, heads, N, N) plus the mask, -inf where attention is forbidden."""
        if self.level_mask is not None:
            scores = add_mask(scores, self.level_mask)
        return scores if valid is None else scores.masked_fill(~valid[:, None, None, :], -math.inf)

    # -- the softmax -------------------------------------------------------------------------------

    @property
    def extra_scores(self) -> Tensor | None:
        """Scores (heads, n) whose probabilities are dropped, or None."""
        found = [extra for step in self.steps if (extra := step.extra_scores()) is not None]
        return torch.cat(found, -1) if found else None

    def probabilities(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Softmax over keys (and what else takes part), rows of padded queries zero; raises
        AttentionError when scores overflow."""
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

    def _steps(self, change: Callable[[Variant], Variant]) -> tuple[Variant, ...]:
        return tuple(map(change, self.steps))

    def select(self, samples: slice, heads: slice) -> "Scoring":
        """Of some samples and heads."""
        mask = None if self.mask is None else selected(self.mask, samples, heads)
        return replace(self, mask=mask, steps=self._steps(lambda step: step.of_heads(heads)))

    def of_tokens(self, keep: Tensor) -> "Scoring":
        """Of some of the tokens, ``keep`` (N,) bool."""
        mask = None if self.mask is None else among(self.mask, keep)
        return replace(self, mask=mask, steps=self._steps(lambda step: step.of_tokens(keep)))

    def without_biases(self) -> "Scoring":
        """For projections without biases; the shift of a normalisation of queries or keys, which is
        none of these, stays."""
        return replace(self, steps=self._steps(lambda step: step.without_biases()))

    def map(self, change: Callable[[Tensor], Tensor], *, mask: bool = True) -> "Scoring":
        """With changed tensors; the mask stays where ``mask`` is False."""
        changed = change(self.mask) if mask and self.mask is not None else self.mask
        return replace(self, mask=changed, steps=self._steps(lambda step: step.map(change)))
