"""Products in blocks of rows, with the keys that they see, against whole matrices and the autograd
Jacobian."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close, near, normal
from support.layers import causal, changed, window
from support.oracles import assert_encloses, oracle
from support.strategies import examples
from support.variants import VARIANTS, layer

import lipbound as lb
from lipbound.jacobians import streaming
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.products import row_blocks
from lipbound.jacobians.streaming import StreamedHeadJacobian, head_jacobian


@pytest.fixture(autouse=True)
def blocks_of_two_rows(monkeypatch):
    """Everywhere, however short the sequences are and however little they save."""
    for name, value in (("ROWS", 2), ("FEWER_ROWS", 2), ("LEAST", 0), ("WORTH", 2.0)):
        monkeypatch.setattr(row_blocks, name, value)
    monkeypatch.setattr(streaming, "ROWS", 2)


@st.composite
def masked(draw, has=VARIANTS):
    """Two samples x three heads of 3 to 9 tokens, with or without a variant.

    Under any mask: random, banded, of each head or sample, with offsets, padding.
    """
    n, g = draw(st.integers(3, 9)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = [(n, n), (3, n, n), (2, 1, n, n), (2, 3, n, n), (n,), (2, 1, 1, n)]
    shape = draw(st.sampled_from(shapes))
    allowed = torch.rand(shape, generator=g) < draw(st.sampled_from([0.2, 0.6]))
    if draw(st.booleans()) and len(shape) > 1 and shape[-2] == n:
        apart, first = torch.arange(n)[:, None] - torch.arange(n), draw(st.integers(-1, 1))
        allowed = (apart >= first) & (apart < draw(st.integers(2, n)))
        allowed = allowed.expand(shape).clone()
    allowed |= torch.rand(shape, generator=g).argsort(-1) == 0  # one key at least
    size = draw(st.sampled_from([0.0, 2.0]))
    offsets = size * torch.randn(shape, generator=g, dtype=torch.float64)
    low = draw(st.sampled_from([-math.inf, torch.finfo(torch.float32).min]))
    chosen = frozenset(draw(st.sampled_from([(), *((v,) for v in has)])))
    att = layer(draw(st.integers(0, 99)), chosen, n=n)
    valid = None
    if draw(st.booleans()):  # the last tokens of the second sample, which no other attends to alone
        valid = torch.arange(n) < torch.tensor([n, n - 1])[:, None]
        allowed[..., 0] = True
    return changed(att, mask=torch.where(allowed, offsets, low), valid=valid)


def pairs(att):
    """The operator on whole matrices, and those in blocks: in memory, formed anew, formed once; and
    some entries of each."""
    blocked = HeadJacobian(att)
    assert blocked.blocks is not None
    plain, kept = blocked._with(blocks=None), StreamedHeadJacobian(att)
    assert kept.kept is not None
    for op in (blocked, kept, kept._with(kept=None), kept.select(slice(0, None)).double()):
        yield plain, op
        yield plain.select(torch.tensor([4, 1])), op.select(torch.tensor([4, 1]))
        yield plain.select(slice(2, 5)), op.select(slice(2, 5))


@given(att=masked())
@examples(45)
def test_products_are_those_of_whole_matrices(att):
    draw = normal()
    with torch.no_grad():
        for whole, op in pairs(att):
            x, y = draw(op.batch, *op.in_shape), draw(op.batch, *op.out_shape)
            near(op.jvp(x), whole.jvp(x), 1e-12)
            near(op.vjp(y), whole.vjp(y), 1e-12)
            near(op.gram(y), whole.gram(y), 1e-12)
            near(op.column_sums(), whole.p.sum(1), 1e-12)
            if op.batch == 2:  # many products
                near(op.dense(), whole.dense(), 1e-12)


@given(att=masked())
@examples(15)
def test_norms_are_those_of_the_autograd_jacobian(att):
    exact = oracle(att)
    for budget in (2e9, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(streaming.WHOLE_BYTES, "cpu", budget)
            assert isinstance(head_jacobian(att), HeadJacobian if budget else StreamedHeadJacobian)
            assert_encloses(att, lb.spectral_norm(att, tol=1e-6, delta=1e-9), exact, 1e-6)


def test_blocks_are_no_larger_than_the_mask_allows():
    """By two rows of nine: a band, and a triangle, of which P is all that is looked at."""
    for mask, entries in ((window(9, 1), 6 + 3 * 8 + 2), (causal(9), 4 + 8 + 12 + 16 + 9)):
        att = changed(layer(0, frozenset(), n=9), mask=mask)
        for found in (HeadJacobian(att).blocks, StreamedHeadJacobian(att).blocks):
            assert found.size == 6 * entries


def test_long_layers_with_few_allowed_entries_are_streamed(monkeypatch):
    monkeypatch.setattr(streaming, "LONG", 16)
    att = layer(0, frozenset(), n=16)
    assert isinstance(head_jacobian(changed(att, mask=window(16, 1))), StreamedHeadJacobian)
    assert isinstance(head_jacobian(changed(att, mask=window(16, 8))), HeadJacobian)
    assert isinstance(head_jacobian(att), HeadJacobian)
    short = changed(layer(0, frozenset(), n=15), mask=window(15, 1))
    assert isinstance(head_jacobian(short), HeadJacobian)


def test_derivatives_pass_through_masked_heads():
    """`along` stays differentiable: with derivatives on, products are of whole matrices."""
    att = changed(layer(0, frozenset(), n=6), mask=window(6, 1))
    ones = torch.ones(6, 6, 7, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda x: HeadJacobian(att.at(x)).along(ones), (att.x.clone().requires_grad_(),)
    )


@pytest.mark.parametrize("has", [(), ("rotation",), ("cap", "sinks"), ("norm",)])
@pytest.mark.parametrize("make", [HeadJacobian, StreamedHeadJacobian])
def test_the_single_precision_copy_is_the_operator_of_the_single_precision_layer(make, has):
    """Made of the float64 one, without forming P anew; of normalised queries and keys there is
    none."""
    att = layer(2, frozenset(has), mask="causal", n=7)  # of moderate scores
    wide = make(att)._with(kept=None)
    op = wide.single()
    assert (op is None) == ("norm" in has)
    if op is None:
        return
    # scores are those of its own masks, in float32 where nothing caps them
    assert make is HeadJacobian or (op.layer is att and op.shifted == ("cap" not in has))
    own = make(att.to(torch.float32))
    y = normal(1, torch.float32)(op.batch, *op.out_shape)
    with torch.no_grad():
        for index in (torch.arange(op.batch), torch.tensor([3, 0])):
            a, b = op.select(index), own.select(index)
            grams = a.gram(y[index]), b.gram(y[index])
            for found, expected in (grams, (a.vjp(y[index]), b.vjp(y[index]))):
                assert found.dtype == torch.float32
                close(found, expected, 1e-3, 1e-4 * float(expected.abs().max()))
        expected = wide.gram(y.double())
        close(op.double().gram(y.double()), expected, 1e-3, 1e-4 * float(expected.abs().max()))
