"""What scores are made of: products of queries and keys, constants, and relative keys.

Read off a copy of the layer that is given chosen tokens (`lipbound.models.capture.probing`).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.variants.relative_keys import RelativeKeys
from lipbound.attention.variants.relative_queries import RelativeQueries
from lipbound.errors import CaptureError
from lipbound.models.capture.probing import ProbedLayer
from lipbound.models.capture.seeing.call import BY_HAND, HIDDEN, Call
from lipbound.models.capture.token_steps import NOISE, ROTATION_TOLERANCE

LARGEST = 2**27
"""Numbers of relative keys of a layer up to which they are read off."""
MORE = 4
"""Passes on tokens that are all the same beyond those that relative keys are determined by."""


class ScoreParts(NamedTuple):
    """Parts of the scores of a layer.

    Attributes:
        scale: the factor of products of queries and keys.
        mask: what is added, (samples, heads, N, N) float64, or None.
        relative: what keys differ by from query to query, and queries from key to key, float64.
    """

    scale: float
    mask: Tensor | None
    relative: tuple[RelativeKeys | RelativeQueries, ...] = ()


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
    """Return the parts of a layer's scores.

    Args:
        call: of the layer, whose scores or masks may depend on its tokens.

    Raises:
        CaptureError: its scores are no such sum.
    """
    layer, g = ProbedLayer(call), torch.Generator().manual_seed(3)
    first, second = (_run(call, layer, layer.random(g)) for _ in range(2))
    hidden = (first.scores <= HIDDEN) & (second.scores <= HIDDEN)
    if (found := _parts(call, first, second, hidden)) is not None:
        return found
    for both in (False, True):
        relative = _relative(call, layer, hidden, both)
        if relative is None:
            continue
        left = [
            one._replace(scores=one.scores - sum(t.products(one.q, one.k) for t in relative))
            for one in (first, second)
        ]
        if (found := _parts(call, left[0], left[1], hidden)) is not None:
            scaled = [t.map(partial(torch.mul, 1 / found.scale)) for t in relative]
            return found._replace(relative=tuple(scaled))
    raise _unknown(call)


def _unknown(call: Call) -> CaptureError:
    return call.unsupported(
        "adds other products of its tokens to those of queries and keys, or changes them"
    )


def _run(call: Call, layer: ProbedLayer, tokens: Tensor) -> ScorePass:
    q, k, _, others = layer.seen(tokens)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if call.way == BY_HAND:
        return ScorePass(q, k, others["scores"].reshape(*q.shape[:-1], k.shape[-2]))
    scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
    scores = scale * q @ k.mT
    for name in ("mask", "position_bias"):
        if (added := others.get(name)) is not None:
            scores = scores + added[..., : k.shape[-2]]
    return ScorePass(q, k, scores)


def _parts(call: Call, first: ScorePass, second: ScorePass, hidden: Tensor) -> ScoreParts | None:
    """Return the factor of products, and what is added, in two passes; None where that is not all.

    A softmax does not see what all scores of a row have in common.
    """
    products, others = first.products, second.products
    change = (first.scores - second.scores).masked_fill(hidden, 0.0)
    of_products = (products - others).masked_fill(hidden, 0.0)
    size = change.abs().amax()
    for common in (False, True):
        if common:
            change, of_products = (_less_common(t, hidden) for t in (change, of_products))
        factor = float((change * of_products).sum() / of_products.square().sum())
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
    return ScoreParts(factor, added if bool((added != 0).any()) else None)


def _less_common(t: Tensor, hidden: Tensor) -> Tensor:
    """Return rows less their means over what is not hidden, which is zero in t."""
    mean = t.sum(-1, keepdim=True) / (~hidden).sum(-1, keepdim=True).clamp_min(1)
    return (t - mean).masked_fill(hidden, 0.0)


def _relative(
    call: Call, layer: ProbedLayer, hidden: Tensor, both: bool
) -> tuple[RelativeKeys | RelativeQueries, ...] | None:
    """Return relative keys, times the scale, fitted to passes on tokens that are all the same.

    Queries are then the same at all positions, and scores are linear in the query and in its
    product with the key. ``both``: relative queries as well, linear in the key. None where they are
    not.

    Raises:
        CaptureError: positions act on queries and keys as well, or they are too many.
    """
    heads, n, d = call.q.shape[1], call.q.shape[-2], call.q.shape[-1]
    if call.sides != "qkv":
        raise _unknown(call)
    if heads * n * n * d * (1 + both) > LARGEST:
        raise call.unsupported(
            f"adds products of its queries with {heads * n * n * d:,} numbers to its scores (at "
            f"most {LARGEST:,} are read off)"
        )
    g, given, rows = torch.Generator().manual_seed(6), [], []
    place = hidden.to(torch.uint8).argmin(0, keepdim=True)  # a sample that sees it, (1, h, n, n)
    for _ in range((1 + both) * d + 2 + MORE):
        one = _run(call, layer, layer.random(g)[:1, :1].expand(call.x.shape).contiguous())
        for t in (one.q, one.k):
            if bool((t - t[:1, :, :1]).abs().amax() > ROTATION_TOLERANCE * t.abs().amax()):
                raise _unknown(call)
        scores = one.scores.expand(len(hidden), heads, n, n)
        rows.append(scores.gather(0, place)[0].flatten(1))
        q, k = one.q[0, :, 0], one.k[0, :, 0]
        known = torch.ones_like(q[:, :1]), (q * k).sum(-1, keepdim=True), q, k
        given.append(torch.cat(known if both else known[:3], -1))
    seen = ~hidden.all(0).flatten(1)  # (heads, n n)
    # (heads, passes, n n or 2 + d + d)
    z, design = torch.stack(rows, 1).masked_fill(~seen[:, None], 0.0), torch.stack(given, 1)
    found = torch.linalg.pinv(design) @ z
    if bool((design @ found - z).abs().amax() > ROTATION_TOLERANCE * z.abs().amax()):
        return None
    keys, *queries = (t.mT.reshape(heads, n, n, d).contiguous() for t in found[:, 2:].split(d, 1))
    return RelativeKeys(_one(keys)), *(RelativeQueries(_one(t)) for t in queries)


def _one(t: Tensor) -> Tensor:
    """Return vectors (heads, N, N, d) as (1, N, N, d) where all heads have the same."""
    alike = bool((t - t[:1]).abs().amax() <= NOISE * t.abs().amax())
    return t[:1].contiguous() if alike else t
