"""What float64 arithmetic does to products: never more than is said."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support.checks import normal
from support.hard_heads import FAMILIES
from support.layers import changed, random_attention
from support.variants import layer

import lipbound as lb
from lipbound.jacobians import rounding

exact = np.vectorize(Fraction, otypes=[object])


def fractions(t):
    """The numbers that a tensor holds, as they are."""
    return exact(t.double().numpy())


def turned(x, turn, sign):
    if turn is None:
        return x
    cos, sin, r = fractions(turn.cos), sign * fractions(turn.sin), turn.cos.shape[1]
    a, b = x[:, :r], x[:, r : 2 * r]
    return np.concatenate([cos * a - sin * b, cos * b + sin * a, x[:, 2 * r :]], 1)


class Exact:
    """The products of one entry of an operator, without rounding."""

    def __init__(self, op, entry, turn):
        self._p, self._t, self._q, self._k, self._v, self._o = (
            fractions(t[entry]) for t in (op.p, op.t, op.q, op.k, op.v, op.o)
        )
        self._r, self._turn = [fractions(part[entry % len(part)]) for part in op.triangle], turn

    def jvp(self, x):
        z_q, z_k, z_v = (x[:, : len(r)] @ r for r in self._r)
        z_q, z_k = turned(z_q, self._turn, 1), turned(z_k, self._turn, 1)
        t = self._t * (z_q @ self._k.T + self._q @ z_k.T)
        return t @ self._v - t.sum(1, keepdims=True) * self._o + self._p @ z_v

    def vjp(self, y):
        g = self._t * (y @ self._v.T - (y * self._o).sum(1, keepdims=True))
        x = (self._p.T @ y) @ self._r[2].T
        for z, r in ((g @ self._k, self._r[0]), (g.T @ self._q, self._r[1])):
            x[:, : len(r)] += turned(z, self._turn, -1) @ r.T
        return x


CASES = [(has, mask) for has in ("", "rotation") for mask in ("none", "causal")]


@pytest.mark.parametrize(("has", "mask"), [*CASES, ("rotation cap", "window")])
def test_products_are_no_further_off_than_is_said(has, mask):
    att = layer(2, frozenset(has.split()), mask=mask, n=6, d=4, d_v=5, samples=1)
    op = lb.HeadJacobian(att)
    found = rounding.roundoff(att, op)
    turn = att.rotation
    draw, worst = normal(), torch.zeros(op.batch, dtype=torch.float64)
    for shape, name in ((op.in_shape, "jvp"), (op.out_shape, "vjp")):
        for _ in range(4):
            x = draw(op.batch, *shape)
            with torch.no_grad():
                y = getattr(op, name)(x)
            for b in range(op.batch):
                off = fractions(y[b]) - getattr(Exact(op, b, turn), name)(fractions(x[b]))
                worst[b] = max(worst[b], float(np.sqrt(float((off**2).sum()))) / float(x[b].norm()))
    assert bool((worst <= found.products).all())
    assert bool((worst > 0).all())
    assert bool((found.size >= torch.linalg.matrix_norm(op.dense(), 2)).all())


def test_the_allowance_is_small_on_real_heads():
    """Far below every tolerance that users ask for: 1e-7 of a norm on pretrained heads."""
    checkpoint = lb.load_checkpoint("builtin:minilm")
    inputs = lb.prepare(checkpoint, ["The ferry to the island leaves at seven."], samples=1)
    for att in lb.capture(checkpoint, inputs, layers=[0, 3]):
        error = rounding.tensor_error(att) / lb.spectral_norm(att).lower
        assert float(error.max()) < 1e-6


@pytest.mark.parametrize("method", ["lanczos", "dense"])
def test_what_rounding_leaves_open_is_said(method):
    """Logits of one head are so large that its probabilities cannot be known."""
    att = random_attention("plain")
    far = changed(att, w_q=torch.cat([att.w_q[:2], 1e9 * att.w_q[2:]]))
    norm = lb.spectral_norm(far, method=method, tol=1e-4, delta=1e-6)
    assert norm.limited.tolist() == [[False, False, True]] * 2
    assert norm.converged.tolist() == [[True, True, False]] * 2
    assert norm._repr_html_().count("False (rounding)") == 2


def test_an_enclosure_closes_or_rounding_is_said_to_be_why():
    """Among them one whose Krylov space ends before its last vector's share of the bound is small,
    which no further step would change."""
    for name, family in FAMILIES.items():
        att = family(torch.Generator().manual_seed(2), torch.float64)
        norm = lb.spectral_norm(att, tol=1e-6, delta=1e-6)
        assert bool((norm.converged | norm.limited).all()), name
        assert name != "variants_far_away" or bool(norm.converged.all())
