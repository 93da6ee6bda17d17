"""The Jacobian of a head as an operator: its products, kept whole or streamed, against dense
autograd Jacobians and against each other."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds
from support.checks import close, near, normal, refused
from support.layers import HARD, random_attention
from support.oracles import oracle
from support.reference import dense_jacobian, head_function

import lipbound as lb
from lipbound.jacobians import streaming
from lipbound.jacobians.l2_attention import L2HeadJacobian
from lipbound.jacobians.products import matrices as products
from lipbound.jacobians.streaming import StreamedHeadJacobian, head_jacobian
from lipbound.linalg.operators import AutogradJacobian, JacobianOperator


@pytest.mark.parametrize("kind_of", [lb.HeadJacobian, L2HeadJacobian])
def test_products_are_adjoint_and_match_the_matrix(att, kind_of):
    op, draw = kind_of(att), normal(1)
    x, y = draw(op.batch, *op.in_shape), draw(op.batch, *op.out_shape)
    matrix = JacobianOperator.dense(op)
    scale = float(matrix.abs().amax()) or 1.0
    close(op.dense() / scale, matrix / scale, atol=1e-12)
    image, pulled = matrix @ x.flatten(1)[..., None], matrix.mT @ y.flatten(1)[..., None]
    close(image[..., 0], op.jvp(x).flatten(1), atol=1e-10 * scale)
    close(pulled[..., 0], op.vjp(y).flatten(1), atol=1e-10 * scale)
    close(op.gram(y), op.jvp(op.vjp(y)), 1e-8, 1e-9 * scale**2)


def test_matrix_has_the_singular_values_of_the_autograd_jacobian(att):
    for i, matrix in enumerate(lb.HeadJacobian(att).dense()):
        reference = torch.linalg.svdvals(dense_jacobian(att, *divmod(i, att.heads)))
        own = torch.linalg.svdvals(matrix)
        count = min(len(own), len(reference))
        close(own[:count], reference[:count], atol=1e-11 * float(reference[0]))


def test_lift_is_the_cotangent_of_the_input():
    att = random_attention("biases")
    op = lb.HeadJacobian(att)
    y = normal(1)(op.batch, *op.out_shape)
    for i, pulled in enumerate(op.lift(op.vjp(y))):
        reference = dense_jacobian(att, *divmod(i, att.heads)).mT @ y[i].flatten()
        close(pulled.flatten(), reference, atol=1e-10)


def test_autograd_operator_matches_the_dense_oracle():
    att = random_attention("window")
    op = AutogradJacobian(head_function(att, 0, 1), att.x[0])
    close(op.dense()[0], dense_jacobian(att, 0, 1), atol=1e-9)
    with pytest.raises(IndexError, match="index 0"):
        op.select(torch.tensor([1]))


def test_products_do_not_depend_on_how_many_heads_they_take_at_a_time(att, monkeypatch):
    op = lb.HeadJacobian(att)
    y = normal()(op.batch, *op.out_shape)
    with torch.no_grad():
        whole = op.gram(y)
        for size in (1, 4 * 8 * att.tokens**2):
            monkeypatch.setattr(products, "GRAM_BYTES", size)
            near(lb.HeadJacobian(att).gram(y), whole, 1e-13)


@pytest.mark.parametrize("kind", ["biases", "causal", "padded"])
def test_scipy_sees_the_dense_jacobian_of_one_head(kind):
    att = random_attention(kind)
    op, (n, d) = lb.HeadJacobian(att), att.x.shape[1:]
    for sample, head in ((0, 0), (att.samples - 1, att.heads - 1)):
        operator = op.as_linear_operator(sample, head)
        real = np.ones(n, bool) if att.valid is None else att.valid[sample].numpy()
        rows, columns = (np.repeat(real, width) for width in (att.d_v, d))
        dense = np.zeros((n * att.d_v, n * d))
        dense[np.ix_(rows, columns)] = dense_jacobian(att, sample, head).numpy()
        assert operator.shape == (n * att.d_v, n * d)
        np.testing.assert_allclose(operator @ np.eye(n * d), dense, atol=1e-12)
        np.testing.assert_allclose(operator.T @ np.eye(n * att.d_v), dense.T, atol=1e-12)
    for place in ((att.samples, 0), (0, att.heads)):
        refused(partial(op.as_linear_operator, *place), "there are ", " samples and ", " heads")
    operator = op.to_scipy(4)
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    (sigma,) = svds(operator, k=1, return_singular_vectors=False, v0=start)
    assert sigma == pytest.approx(float(oracle(att)[1, 1]), rel=1e-8)


# -- heads whose attention matrices are never kept -------------------------------------------------


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 150, 2**23])
def rows(request, monkeypatch):
    """Bytes that stream: one row at a time, three, all."""
    monkeypatch.setitem(streaming.STREAMED_BYTES, "cpu", request.param)
    monkeypatch.setitem(streaming.WHOLE_BYTES, "cpu", 0)
    return request.param


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("map", ["head", "head_out", "heads", "layer"])
def test_streamed_norms_are_those_of_whole_heads(kind, map, rows, monkeypatch):
    att = random_attention(kind)
    # a few rows at a time, products are slow: they are compared above, and plain norms here
    delta = 1e-6 if rows > 150 else None
    measure = partial(lb.spectral_norm, att, map=map, tol=1e-9, delta=delta, vectors=True)
    assert isinstance(head_jacobian(att), StreamedHeadJacobian)
    streamed = measure()
    assert att.cache.get("p", lambda: None) is None  # all of P was never formed
    att.cache.drop("p")
    _ = att.p  # whether it is there decides nothing
    assert isinstance(head_jacobian(att), StreamedHeadJacobian)
    monkeypatch.setitem(streaming.WHOLE_BYTES, "cpu", 2e9)
    assert isinstance(head_jacobian(att), lb.HeadJacobian)
    whole = measure()
    close(streamed.lower, whole.lower, 1e-8, 1e-12)
    assert streamed.left.shape == whole.left.shape
    assert streamed.right.shape == whole.right.shape
    exact = oracle(att, map)
    assert bool((streamed.lower <= exact * (1 + 1e-12)).all())
    assert bool((streamed.upper >= exact * (1 - 1e-12)).all())


def test_float32_streams_as_precisely():
    att, y = random_attention("sharp", dtype=torch.float32), normal(0, torch.float32)(6, 6, 4)
    with torch.no_grad():
        near(StreamedHeadJacobian(att).gram(y), lb.HeadJacobian(att).gram(y), 3e-6)


def test_large_layers_are_streamed():
    """N = 16384: the attention matrix of one head alone is a gigabyte."""
    assert not isinstance(head_jacobian(random_attention("plain")), StreamedHeadJacobian)
    att = lb.Attention(torch.zeros(1, 16384, 2), *(torch.zeros(1, 2, 1) for _ in range(3)))
    assert att.tokens**2 * streaming.SCORE_BYTES > streaming.WHOLE_BYTES["cpu"]
