import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds
from support.layers import random_attention
from support.oracles import oracle
from support.reference import dense_jacobian, head_function

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.l2_attention import L2HeadJacobian
from lipbound.jacobians.products import matrices as products
from lipbound.linalg.operators import AutogradJacobian, JacobianOperator


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind_of", [HeadJacobian, L2HeadJacobian])
def test_products_are_adjoint_and_match_the_matrix(
    att: Attention, kind_of: type[JacobianOperator]
) -> None:
    op = kind_of(att)
    x, y = draw(op.batch, *op.in_shape), draw(op.batch, *op.out_shape)
    matrix = JacobianOperator.dense(op)
    scale = float(matrix.abs().amax()) or 1.0
    torch.testing.assert_close(op.dense() / scale, matrix / scale, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        (matrix @ x.flatten(1)[..., None])[..., 0],
        op.jvp(x).flatten(1),
        rtol=1e-9,
        atol=1e-10 * scale,
    )
    torch.testing.assert_close(
        (matrix.mT @ y.flatten(1)[..., None])[..., 0],
        op.vjp(y).flatten(1),
        rtol=1e-9,
        atol=1e-10 * scale,
    )
    torch.testing.assert_close(op.gram(y), op.jvp(op.vjp(y)), rtol=1e-8, atol=1e-9 * scale**2)


def test_matrix_has_the_singular_values_of_the_autograd_jacobian(att: Attention) -> None:
    op = HeadJacobian(att)
    matrices = op.dense()
    for i in range(op.batch):
        s, h = divmod(i, att.heads)
        own, reference = (
            torch.linalg.svdvals(matrices[i]),
            torch.linalg.svdvals(dense_jacobian(att, s, h)),
        )
        count = min(len(own), len(reference))
        torch.testing.assert_close(
            own[:count], reference[:count], rtol=1e-9, atol=1e-11 * float(reference[0])
        )


def test_lift_is_the_cotangent_of_the_input() -> None:
    att = random_attention("biases")
    op = HeadJacobian(att)
    y = draw(op.batch, *op.out_shape)
    pulled = op.lift(op.vjp(y))
    for i in range(op.batch):
        s, h = divmod(i, att.heads)
        reference = dense_jacobian(att, s, h).mT @ y[i].flatten()
        torch.testing.assert_close(pulled[i].flatten(), reference, rtol=1e-9, atol=1e-10)


def test_l2_operator_is_the_derivative_of_l2_attention() -> None:
    att = random_attention("causal")
    op = L2HeadJacobian(att)
    for i in range(op.batch):
        s, h = divmod(i, att.heads)

        def f(x: torch.Tensor, h: int = h) -> torch.Tensor:
            q = x @ att.w_q[h]
            logits = -att.scale * ((q[:, None] - q[None]) ** 2).sum(-1) + att.mask
            return (
                torch.softmax(logits, -1)
                @ x
                @ (att.scale * att.w_q[h] @ att.w_q[h].mT)
                @ att.w_v[h]
            )

        jacobian = torch.func.jacrev(f)(att.x[s])
        reference = torch.linalg.svdvals(jacobian.reshape(24, -1))
        torch.testing.assert_close(
            torch.linalg.svdvals(op.dense()[i])[:24], reference, rtol=1e-9, atol=1e-9
        )


def test_autograd_operator_matches_the_dense_oracle() -> None:
    att = random_attention("window")
    op = AutogradJacobian(head_function(att, 0, 1), att.x[0])
    torch.testing.assert_close(op.dense()[0], dense_jacobian(att, 0, 1), rtol=1e-9, atol=1e-9)
    with pytest.raises(IndexError, match="index 0"):
        op.select(torch.tensor([1]))


def test_scipy_can_use_it() -> None:
    att = random_attention("causal")
    operator = HeadJacobian(att).to_scipy(4)
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    sigma = svds(operator, k=1, return_singular_vectors=False, v0=start)
    assert abs(sigma[0] / float(oracle(att).flatten()[4]) - 1) < 1e-8


def test_select_is_a_part_of_the_batch() -> None:
    op = HeadJacobian(random_attention("biases"))
    index = torch.tensor([5, 2])
    torch.testing.assert_close(op.select(index).dense(), op.dense()[index])


def test_huge_biases_do_not_cancel() -> None:
    att = random_attention("plain", dtype=torch.float32)
    shifted = Attention(att.x, att.w_q, att.w_k, att.w_v, b_v=torch.full((3, 4), 1e4))
    ratio = (
        torch.linalg.svdvals(HeadJacobian(shifted).dense().double())[:, 0]
        / torch.linalg.svdvals(HeadJacobian(att).dense().double())[:, 0]
    )
    assert float((ratio - 1).abs().max()) < 2e-3  # v itself is rounded at 1e-3 there


def test_products_do_not_depend_on_how_many_heads_they_take_at_a_time(
    att: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = HeadJacobian(att)
    y = torch.randn(
        op.batch, *op.out_shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    with torch.no_grad():
        whole = op.gram(y)
        for size in (1, 4 * 8 * att.tokens**2):
            monkeypatch.setattr(products, "GRAM_BYTES", size)
            torch.testing.assert_close(
                HeadJacobian(att).gram(y), whole, rtol=0, atol=1e-13 * float(whole.abs().max())
            )


@pytest.mark.parametrize("kind", ["biases", "causal", "padded"])
def test_scipy_sees_the_dense_jacobian_of_one_head(kind: str) -> None:
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
    for sample, head in ((att.samples, 0), (0, att.heads)):
        with pytest.raises(LipboundError, match=r"there are .* samples and .* heads"):
            op.as_linear_operator(sample, head)
