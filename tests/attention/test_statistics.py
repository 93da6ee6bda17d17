"""Statistics of attention, against loops over what the softmax sees."""

import math
from functools import partial

import pytest
import torch
from support.layers import KINDS, changed, places, random_attention

from lipbound.attention.layer import Attention
from lipbound.schema import STATISTICS


def naive(att, sample, head):
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


def padded_in_front():
    att = random_attention("biases")
    return changed(att, valid=torch.tensor([[False] * 2 + [True] * 4, [True] * 6]))


@pytest.mark.parametrize(
    "make", [partial(random_attention, kind) for kind in KINDS] + [padded_in_front]
)
def test_statistics_are_those_of_loops(make):
    att = make()
    found = att.statistics()
    for place in places(att):
        mine = [float(found[name][place]) for name in STATISTICS]
        assert mine == pytest.approx(naive(att, *place), rel=1e-9)


def test_statistics_of_uniform_attention():
    x = torch.randn(1, 8, 3, generator=torch.Generator().manual_seed(0)).double()
    zero, w_v = torch.zeros(2, 3, 3).double(), torch.ones(2, 3, 3).double()
    found = Attention(x, zero, zero, w_v).statistics()
    assert found["largest_logit"].tolist() == [[0.0, 0.0]]
    assert found["entropy"][0].tolist() == pytest.approx([math.log(8)] * 2)
    assert found["first_token"][0].tolist() == pytest.approx([1 / 8] * 2)
