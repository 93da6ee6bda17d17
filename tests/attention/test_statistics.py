"""Statistics of attention, against loops over what the softmax sees."""

import math

import pytest
import torch
from support.layers import random_attention

from lipbound.attention.layer import Attention
from lipbound.schema import STATISTICS


def naive(att: Attention, sample: int, head: int) -> tuple[float, float, float]:
    """The same numbers, query by query and key by key."""
    seen = torch.ones(att.tokens, dtype=torch.bool) if att.valid is None else att.valid[sample]
    real = seen.nonzero()[:, 0].tolist()
    scores = att.scores(att.q, att.k)[sample, head]
    raw = att.scale * att.q[sample, head] @ att.k[sample, head].T
    logits, entropies, first = [], [], []
    for i in real:
        open_ = [j for j in real if scores[i, j] > -math.inf]
        logits += [float(raw[i, j]) for j in open_]
        p = [float(att.p[sample, head, i, j]) for j in open_]
        entropies.append(-sum(x * math.log(x) for x in p if x > 0))
        first.append(float(att.p[sample, head, i, real[0]]))
    return max(logits), sum(entropies) / len(real), sum(first) / len(real)


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("causal", [False, True])
def test_statistics_are_those_of_loops(side: str | None, causal: bool) -> None:
    plain = random_attention("plain")
    n, valid = plain.tokens, None
    if side is not None:
        valid = torch.ones(plain.samples, n, dtype=torch.bool)
        valid[0, slice(0, 2) if side == "left" else slice(n - 2, n)] = False
    mask = torch.full((n, n), -math.inf).triu(1).double() if causal else None
    weights = (plain.w_q, plain.w_k, plain.w_v)
    att = Attention(plain.x, *weights, b_q=torch.ones_like(plain.w_q[:, 0]), mask=mask, valid=valid)
    found = att.statistics()
    for sample in range(att.samples):
        for head in range(att.heads):
            mine = [float(found[name][sample, head]) for name in STATISTICS]
            assert mine == pytest.approx(naive(att, sample, head), rel=1e-9)


def test_statistics_of_uniform_attention() -> None:
    x = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0)).double()
    zero, w_v = torch.zeros(2, 3, 3).double(), torch.ones(2, 3, 3).double()
    found = Attention(x, zero, zero, w_v).statistics()
    assert found["largest_logit"].tolist() == [[0.0, 0.0]]
    assert found["entropy"][0].tolist() == pytest.approx([math.log(8)] * 2)
    assert found["first_token"][0].tolist() == pytest.approx([1 / 8] * 2)


def test_every_kind_of_layer_has_statistics(att: Attention) -> None:
    for value in att.statistics().values():
        assert value.shape == (att.samples, att.heads)
        assert bool(torch.isfinite(value).all())
