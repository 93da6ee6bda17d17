"""Norms with proofs: enclosures that hold with certainty."""

import pytest
import torch
from support.layers import random_attention
from support.oracles import encloses, oracle

from lipbound import devices
from lipbound.attention.layer import Attention
from lipbound.errors import LipboundError
from lipbound.jacobians.gram import Gram
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.prepared_map import PreparedMap
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.deterministic import deflate
from lipbound.linalg.krylov import top_vectors


@pytest.mark.parametrize("map", ["head", "head_out"])
def test_enclosures_hold_and_close(att: Attention, map: str) -> None:
    norm = spectral_norm(att, method="deflation", tol=1e-7, map=map, vectors=True)
    exact = oracle(att) if map == "head" else oracle(att.fold_output()[0])
    measured = PreparedMap(att, map)
    error = measured.roundoff.tensors.view(2, 3) * 2.0**measured.exponents
    assert encloses(norm, exact, 1e-7, error)
    assert bool((norm.converged | (error > 1e-8 * exact)).all())
    assert norm.left is not None
    assert norm.left.shape == (2, 3, att.tokens, 9 if map == "head_out" else att.d_v)


def test_deflating_any_vectors_encloses(att: Attention) -> None:
    """Random vectors prove little, but nothing false."""
    exact = oracle(att)
    gram = Gram(att, 0, [2])
    for rank in (1, 3):
        q = torch.randn(
            gram.tokens * gram.width,
            min(rank, gram.tokens * gram.width),
            generator=torch.Generator().manual_seed(rank),
        ).double()
        low, high, top = deflate(gram, q)
        assert low**0.5 <= float(exact[0, 2]) * (1 + 1e-13)
        assert high**0.5 >= float(exact[0, 2]) * (1 - 1e-13)
        assert float(top.norm()) == pytest.approx(1)


def test_zero_and_rank_one() -> None:
    x, w = torch.ones(1, 4, 3, dtype=torch.float64), torch.ones(2, 3, 2, dtype=torch.float64)
    zero = spectral_norm(Attention(x, w, w, w * 0), method="deflation")
    assert zero.lower.tolist() == zero.upper.tolist() == [[0.0, 0.0]]
    assert bool(zero.converged.all())
    att = Attention(x, w, w, w)
    norm = spectral_norm(att, method="deflation", tol=1e-6)
    assert bool(
        (norm.lower <= oracle(att)).all()
        and (oracle(att) <= norm.upper).all()
        and norm.converged.all()
    )


def test_float32_layers_are_measured_in_float64() -> None:
    att = random_attention("biases", dtype=torch.float32)
    norm = spectral_norm(att, method="deflation", tol=1e-8)
    torch.testing.assert_close(norm.lower, oracle(att), rtol=1e-8, atol=0)


def test_ritz_vectors_go_on_after_an_exhausted_space() -> None:
    """G with two distinct eigenvalues: a Krylov space of two dimensions, and more vectors asked
    for."""
    zero = torch.zeros(1, 6, 1, dtype=torch.float64)
    w_v = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    op = HeadJacobian(Attention(torch.ones(1, 1, 6, dtype=torch.float64), zero, zero, w_v[None]))
    vectors, _ = top_vectors(op, count=4, residual=0.0, max_steps=6, seed=0, restart=1e-12)
    torch.testing.assert_close(vectors[0] @ vectors[0].mT, torch.eye(4, dtype=torch.float64))
    images = torch.cat([op.gram(v.view(1, 1, 6)).view(1, 6) for v in vectors[0]])
    torch.testing.assert_close(
        (vectors[0] * images).sum(-1), torch.tensor([4.0, 4.0, 1.0, 1.0], dtype=torch.float64)
    )


def test_memory_is_checked_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda device: 1000.0)
    with pytest.raises(LipboundError, match=r"method 'deflation' needs .* of memory are free; use"):
        spectral_norm(random_attention("plain"), method="deflation")


def test_available_memory_is_plausible() -> None:
    assert 1e7 < devices.available(torch.device("cpu")) < 1e14


def test_tolerances() -> None:
    with pytest.raises(LipboundError, match="tol is 0"):
        spectral_norm(random_attention("plain"), method="deflation", tol=0)
