"""Published bounds against their formulas in 60-digit arithmetic at the numbers given: never below,
and hardly above."""

import mpmath as mp
import pytest
import torch
from support.checks import normal
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention


def matrix(t: Tensor) -> mp.matrix:
    return mp.matrix([[mp.mpf(float(v)) for v in row] for row in t.double()])


def norm(m: mp.matrix) -> mp.mpf:
    gram = m.T * m if m.cols <= m.rows else m * m.T
    return mp.sqrt(max(max(mp.eigsy(gram, eigvals_only=True)), 0))


def length(m: mp.matrix) -> mp.mpf:
    return mp.sqrt(sum(v * v for v in m))


def formulas(att: Attention, h: int) -> dict[str, mp.mpf]:
    """The statements for a head without biases or mask."""
    x, w_q, w_k, w_v = matrix(att.x[0]), matrix(att.w_q[h]), matrix(att.w_k[h]), matrix(att.w_v[h])
    n, c = x.rows, mp.mpf(att.scale)
    a = c * w_q * w_k.T
    scores = x * a * x.T
    tops = [max(scores[i, :]) for i in range(n)]
    weights = [[mp.exp(score - top) for score in scores[i, :]] for i, top in enumerate(tops)]
    rows = [[weight / sum(row) for weight in row] for row in weights]
    p = mp.matrix(rows)
    m = [mp.diag(row) - mp.matrix(row) * mp.matrix(row).T for row in rows]
    ordered = [sorted(row, reverse=True) for row in rows]
    tokens = [x[i, :] for i in range(n)]
    r = max(length(t) for t in tokens)
    apart = max(length(s - t) for s in tokens for t in tokens)
    side = max(max(length(t * a), length(t * a.T)) for t in tokens)
    v, norm_a, norm_x, norm_p, root3 = norm(w_v), norm(a), norm(x), norm(p), mp.sqrt(3)
    t, keys = norm_a * r**2, max(length(t * a.T) for t in tokens)
    g1 = max(row[0] * (1 - row[0] + row[1]) for row in ordered)
    return {
        "castin": root3 * v * mp.sqrt(t**2 * (4 * n + 1) + n),
        "castin_bias": root3 * v * mp.sqrt(t**2 + n * t**2 + n),
        "castin_c3": root3 * v * mp.sqrt((side * apart) ** 2 * (n + 1) + n),
        "yudin_nobias": v * (norm_p + 2 * norm_x**2 * norm_a * max(norm(mi) for mi in m)),
        "yudin_g1": v * (norm_p + 2 * norm_x**2 * norm_a * g1),
        "yudin_sqrt_n": v * (norm_p + 2 * norm_x * norm_a * max(norm(x.T * mi) for mi in m)),
        "yudin_closed": v * mp.sqrt(n) * (1 + 2 * t),
        "dasoulas": v * (length(p) + mp.sqrt(2) * r * (keys + length(x * a))),
        "newhouse": v * (1 + 2 * c * norm(w_q) * norm(w_k) * r**2),
        "specformer": n * (n + 1) * length(x) ** 2 * v * (norm(w_q) * norm(w_k) + 1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logits", [1.0, 30.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_values_are_upper_values_in_real_arithmetic(
    offset: float, logits: float, dtype: torch.dtype
) -> None:
    """``offset`` is common to all tokens; W_K nearly annihilates it, so that scores cancel."""
    draw = normal(int(logits) % 1000 + int(offset))
    x, w_q, w_k, w_v, common = draw(1, 4, 3), draw(2, 3, 2), draw(2, 3, 2), draw(2, 3, 2), draw(3)
    common = common / common.norm()
    w_k = w_k - common[:, None] * (common @ w_k)[:, None] * (1 - 1e-6)
    att = Attention(*(t.to(dtype) for t in (x + offset * common, w_q * logits, w_k, w_v)))
    with mp.workdps(60):
        for h in range(att.heads):
            for name, expected in formulas(att, h).items():
                excess = mp.mpf(float(bounds.get(name)(att)[0, h])) / expected - 1
                assert excess >= 0, (name, mp.nstr(excess, 5))
                assert excess <= 1e-9 or logits * max(1.0, offset) > 30, (name, mp.nstr(excess, 5))
