"""Parts of scores: products of queries and keys, constants, and relative positions.

Read off a copy of the layer that is given chosen tokens (`lipbound.models.capture.probing`).
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.variants.relative_keys import RelativeKeys
from lipbound.attention.variants.relative_queries import RelativeQueries
from lipbound.models.capture.probing import ADDED, ProbedLayer
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, Call
from lipbound.models.capture.token_steps import NOISE, ROTATION_TOLERANCE

LARGEST = 2**27
"""Numbers of relative keys of a layer up to which they are read off."""
MORE = 4
"""Passes on tokens that are all the same beyond those that relative keys are determined by."""


Relative = tuple[RelativeKeys | RelativeQueries, ...]
"""Relative keys, then relative queries, where there are some."""


class ScoreParts(NamedTuple):
    """Parts of the scores of a layer.

    Attributes:
        scale: the factor of products of queries and keys, or one for each head, (heads, 1, 1).
        mask: what is added, (samples, heads, N, N) float64, or None.
        relative: relative keys and queries, float64.
    """

    scale: float | Tensor
    mask: Tensor | None
    relative: Relative = ()


class ScorePass(NamedTuple):
    """Queries and keys (samples, heads, N, d) of one pass, and scores before the softmax."""

    q: Tensor
    k: Tensor
    scores: Tensor

    @property
    def products(self) -> Tensor:
        """Products of queries and keys, (samples, heads, N, N)."""
        return self.q @ self.k.mT

    def without(self, relative: Relative) -> "ScorePass":
        """Return the pass with scores less what relative positions add to them."""
        added = [one.products(self.q, self.k) for one in relative]
        return self._replace(scores=self.scores - torch.stack(added).sum(0))


def score_parts(call: Call, known: ScoreParts | None = None) -> ScoreParts:
    """Return the parts of a layer's scores.

    Args:
        call: of the layer, whose scores or masks may depend on its tokens.
        known: of an earlier call of the layer, whose relative positions are tried first.

    Raises:
        CaptureError: its scores are no such sum.
    """
    layer, g = ProbedLayer(call), torch.Generator().manual_seed(3)
    passes = [_run(call, layer, layer.random(g)) for _ in range(2)]
    hidden = (passes[0].scores <= HIDDEN) & (passes[1].scores <= HIDDEN)
    if (found := _parts(call, passes, hidden)) is not None:
        return found
    fits = [one.fits(call.q.shape[-2]) for one in ([] if known is None else known.relative)]
    if known is not None and fits and all(fits):
        scaled = _times(known.relative, float(known.scale))
        if (found := _parts(call, [one.without(scaled) for one in passes], hidden)) is not None:
            return found._replace(relative=known.relative)
    for relative in _relative(call, layer, hidden):
        if (found := _parts(call, [one.without(relative) for one in passes], hidden)) is not None:
            if isinstance(found.scale, Tensor):
                break
            return found._replace(relative=_times(relative, 1 / found.scale))
    raise call.unsupported(
        "adds other products of its tokens to those of queries and keys, or changes them"
    )


def _times(relative: Relative, factor: float) -> Relative:
    return tuple(one.map(partial(torch.mul, factor)) for one in relative)


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


def _relative(call: Call, layer: ProbedLayer, hidden: Tensor) -> Iterator[Relative]:
    """Yield relative positions, times the scale, fitted to passes on tokens that are all the same.

    Queries and keys are then the same at all positions, and scores are linear in the query and in
    its product with the key; in the second that are yielded, linear in the key as well.

    Raises:
        CaptureError: positions act on queries and keys as well, or they are too many.
    """
    heads, n, d = call.q.shape[1], call.q.shape[-2], call.q.shape[-1]
    g, given = torch.Generator().manual_seed(6), []
    rows: list[Tensor] = []
    place = hidden.to(torch.uint8).argmin(0, keepdim=True)  # a sample that sees it, (1, h, n, n)
    seen = ~hidden.all(0).flatten(1)  # (heads, n n)
    for sides in (1, 2):
        if call.sides != "qkv":
            return
        if sides * heads * n * n * d > LARGEST:
            raise call.unsupported(
                f"adds products of its queries or keys with {sides * heads * n * n * d:,} numbers "
                f"to its scores (at most {LARGEST:,} are read off)"
            )
        while len(rows) < sides * d + 2 + MORE:
            one = _run(call, layer, layer.random(g)[:1, :1].expand(call.x.shape).contiguous())
            for t in (one.q, one.k):
                if bool((t - t[:1, :, :1]).abs().amax() > ROTATION_TOLERANCE * t.abs().amax()):
                    return
            scores = one.scores.expand(len(hidden), heads, n, n)
            rows.append(scores.gather(0, place)[0].flatten(1))
            q, k = one.q[0, :, 0], one.k[0, :, 0]
            given.append([torch.ones_like(q[:, :1]), (q * k).sum(-1, keepdim=True), q, k])
        design = torch.stack([torch.cat(parts[: 2 + sides], -1) for parts in given], 1)
        z = torch.stack(rows, 1).masked_fill(~seen[:, None], 0.0)  # (heads, passes, n n)
        found = torch.linalg.pinv(design) @ z
        if bool((design @ found - z).abs().amax() <= ROTATION_TOLERANCE * z.abs().amax()):
            parts = found[:, 2:].split(d, 1)
            keys, *queries = (_one(t.mT.reshape(heads, n, n, d).contiguous()) for t in parts)
            yield RelativeKeys(keys), *(RelativeQueries(t) for t in queries)


def _one(t: Tensor) -> Tensor:
    """Return vectors (heads, N, N, d) as (1, N, N, d) where all heads have the same."""
    alike = bool((t - t[:1]).abs().amax() <= NOISE * t.abs().amax())
    return t[:1].contiguous() if alike else t
