"""Parts of scores: products of queries and keys, and constants.

Read off a copy of the layer that is given chosen tokens (`lipbound.models.capture.probing`).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.models.capture.probing import ADDED, ProbedLayer
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, Call
from lipbound.models.capture.token_steps import NOISE, ROTATION_TOLERANCE


class ScoreParts(NamedTuple):
    """Parts of the scores of a layer.

    Attributes:
        scale: the factor of products of queries and keys, or one for each head, (heads, 1, 1).
        mask: what is added, (samples, heads, N, N) float64, or None.
    """

    scale: float | Tensor
    mask: Tensor | None


class ScorePass(NamedTuple):
    """Queries and keys (samples, heads, N, d) of one pass, and scores before the softmax."""

    q: Tensor
    k: Tensor
    scores: Tensor

    @property
    def products(self) -> Tensor:
        """Products of queries and keys, (samples, heads, N, N)."""
        return self.q @ self.k.mT


def score_parts(call: Call) -> ScoreParts:
    """Return the parts of the scores of a layer, whose scores or masks may depend on its tokens.

    Raises:
        CaptureError: its scores are no such sum.
    """
    layer, g = ProbedLayer(call), torch.Generator().manual_seed(3)
    passes = [_run(call, layer, layer.random(g)) for _ in range(2)]
    hidden = (passes[0].scores <= HIDDEN) & (passes[1].scores <= HIDDEN)
    if (found := _parts(call, passes, hidden)) is not None:
        return found
    raise call.unsupported(
        "adds other products of its tokens to those of queries and keys, or changes them"
    )


def _run(call: Call, layer: ProbedLayer, tokens: Tensor) -> ScorePass:
    (q, k, _), others = layer.seen(tokens)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if call.way == BY_HAND:
        return ScorePass(q, k, others["scores"].reshape(*q.shape[:-1], k.shape[-2]))
    scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    for name in ADDED:
        if (added := others.get(name)) is not None:
            scores = scores + added[..., : k.shape[-2]]
    return ScorePass(q, k, scores)


def _parts(call: Call, passes: Sequence[ScorePass], hidden: Tensor) -> ScoreParts | None:
    """Return the factor of products, and what is added, in two passes; None where that is not all.

    A softmax without sinks does not see what all scores of a row have in common.
    """
    first, second = passes
    products, others = first.products, second.products
    change = (first.scores - second.scores).masked_fill(hidden, 0.0)
    of_products = (products - others).masked_fill(hidden, 0.0)
    size = change.abs().amax()
    commons = (False,) if "s_aux" in call.extras else (False, True)
    for common, axes in itertools.product(commons, ((0, 1, 2, 3), (0, 2, 3))):
        if common:
            change, of_products = (_less_common(t, hidden) for t in (change, of_products))
        factor = (change * of_products).sum(axes, keepdim=True)[0]
        factor = factor / of_products.square().sum(axes, keepdim=True)[0]
        if bool((change - factor * of_products).abs().amax() <= ROTATION_TOLERANCE * size):
            break
    else:
        return None
    added = first.scores - factor * products
    if common:
        added = _less_common(added.masked_fill(hidden, 0.0), hidden)
    largest = first.scores[~hidden].abs().amax()
    added[(added.abs() <= NOISE * largest) & ~hidden] = 0
    added = added.masked_fill(hidden, torch.finfo(call.x.dtype).min)
    scale = factor if len(factor) > 1 else float(factor)
    return ScoreParts(scale, added if bool((added != 0).any()) else None)


def _less_common(t: Tensor, hidden: Tensor) -> Tensor:
    """Return rows less their means over what is not hidden, which is zero in t."""
    mean = t.sum(-1, keepdim=True) / (~hidden).sum(-1, keepdim=True).clamp_min(1)
    return (t - mean).masked_fill(hidden, 0.0)
