"""Heads whose attention matrices are never kept, against those that are."""

import pytest
import torch
from support.layers import HARD, random_attention
from support.oracles import oracle

from lipbound.attention.layer import Attention
from lipbound.jacobians import streaming
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.jacobians.streaming import StreamedHeadJacobian, head_jacobian


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 150, 2**23])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that stream: one row at a time, three, all."""
    monkeypatch.setitem(streaming.ROW_BYTES, "cpu", request.param)
    monkeypatch.setitem(streaming.WHOLE_BYTES, "cpu", 0)
    return request.param


@pytest.mark.each_value(kind=HARD)
def test_products_are_those_of_whole_heads(att: Attention, rows: int) -> None:
    whole, streamed = HeadJacobian(att), StreamedHeadJacobian(att)
    g = torch.Generator().manual_seed(0)
    index = torch.tensor([4, 1])
    for a, b in (
        (whole, streamed),
        (whole.select(index), streamed.select(index)),
        (whole.double(), streamed.double()),
    ):
        x, y = (
            torch.randn(a.batch, *shape, generator=g, dtype=torch.float64)
            for shape in (a.in_shape, a.out_shape)
        )
        with torch.no_grad():
            torch.testing.assert_close(
                b.jvp(x), a.jvp(x), rtol=0, atol=1e-12 * float(a.jvp(x).abs().max())
            )
            torch.testing.assert_close(
                b.vjp(y), a.vjp(y), rtol=0, atol=1e-12 * float(a.vjp(y).abs().max())
            )
            torch.testing.assert_close(
                b.gram(y), a.gram(y), rtol=0, atol=1e-12 * float(a.gram(y).abs().max())
            )
        if rows > 1:  # many products
            torch.testing.assert_close(
                b.dense(), a.dense(), rtol=0, atol=1e-12 * float(a.dense().abs().max())
            )


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("map", ["head", "head_out", "heads", "layer"])
def test_norms_are_those_of_whole_heads(
    kind: str, map: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    att = random_attention(kind)
    # a few rows at a time, products are slow: they are compared above, and plain norms here
    delta = 1e-6 if rows > 150 else None
    assert isinstance(head_jacobian(att), StreamedHeadJacobian)
    streamed = spectral_norm(att, map=map, tol=1e-9, delta=delta, vectors=True)
    assert att.cache.get("p", lambda: None) is None  # all of P was never formed
    att.cache.drop("p")
    _ = att.p  # whether it is there decides nothing
    assert isinstance(head_jacobian(att), StreamedHeadJacobian)
    monkeypatch.setitem(streaming.WHOLE_BYTES, "cpu", 2e9)
    assert isinstance(head_jacobian(att), HeadJacobian)
    whole = spectral_norm(att, map=map, tol=1e-9, delta=delta, vectors=True)
    torch.testing.assert_close(streamed.lower, whole.lower, rtol=1e-8, atol=1e-12)
    for a, b in ((streamed.left, whole.left), (streamed.right, whole.right)):
        assert a is not None
        assert b is not None
        assert a.shape == b.shape
    if map == "head" and delta is not None:
        assert bool((streamed.upper >= oracle(att) * (1 - 1e-12)).all())


def test_float32_streams_as_precisely() -> None:
    att = random_attention("sharp", dtype=torch.float32)
    with torch.no_grad():
        y = torch.randn(6, 6, 4, generator=torch.Generator().manual_seed(0))
        whole = HeadJacobian(att).gram(y)
        torch.testing.assert_close(
            StreamedHeadJacobian(att).gram(y), whole, rtol=0, atol=3e-6 * float(whole.abs().max())
        )


def test_large_layers_are_streamed() -> None:
    """N = 16384: the attention matrix of one head alone is a gigabyte."""
    x = torch.zeros(1, 16384, 2)
    assert not isinstance(streaming.head_jacobian(random_attention("plain")), StreamedHeadJacobian)
    att = Attention(x, *(torch.zeros(1, 2, 1) for _ in range(3)))
    assert att.tokens**2 * streaming.SCORE_BYTES > streaming.WHOLE_BYTES["cpu"]
