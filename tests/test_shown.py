"""What objects show of themselves at a prompt, and what modules list."""

import pytest
import torch
from support.layers import random_attention
from support.models import AFFINE, build
from support.runs import made_up

import lipbound as lb
from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer
from lipbound.reporting.tables import text_table


def test_objects_show_their_numbers() -> None:
    head = lb.HeadJacobian(lb.Attention(torch.ones(2, 5, 8), *[torch.ones(3, 8, 4)] * 3))
    for shown, text in (
        (JaSMin(3, "mean"), "JaSMin(k=3, reduce='mean')"),
        (ExactNorm(1e-4), "ExactNorm(tol=0.0001, seed=0)"),
        (head, "HeadJacobian(6 heads of samples, 5 x 8 to 5 x 4, float32)"),
        (SoundPenalty(), "SoundPenalty(name='lipbound_block')"),
        (Specformer(1, 0.5, 2), "Specformer(l_q=1, l_k=0.5, l_v=2, steps=1)"),
    ):
        assert repr(shown) == text
    table = lb.tables.table_of(made_up())
    assert repr(table) == text_table(table)
    ids = torch.tensor([[1, 2, 3], [3, 2, 1]])
    monitor = lb.Monitor(build(AFFINE["bert"]), ids, every=5)
    what = "Monitor(BertModel, 2 samples, 2 layers, "
    assert repr(monitor) == f"{what}every 5 steps; measured: 0)"
    monitor.step(0)
    assert repr(monitor) == f"{what}every 5 steps; measured: 1)"
    monitor = lb.Monitor(build(AFFINE["bert"]), ids, steps=[9, 1])
    assert repr(monitor) == f"{what}steps [1, 9]; measured: 0)"


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_upper_ends_that_nobody_asked_for_are_no_failure(method: str) -> None:
    att = random_attention("plain")
    plain = lb.spectral_norm(att, method=method)
    assert plain.upper.isinf().all()
    for shown in (repr(plain), plain._repr_html_()):
        assert "not asked (delta=)" in shown
        assert "inf" not in shown
    enclosed = lb.spectral_norm(att, delta=1e-6)
    assert f"upper={enclosed.upper}" in repr(enclosed)
    assert "left" not in repr(enclosed)
    assert "left=tensor" in repr(lb.spectral_norm(att, vectors=True))
    assert "not asked" not in enclosed._repr_html_()
    far = lb.spectral_norm(lb.Attention(att.x * 1e50, att.w_q, att.w_k, att.w_v), delta=1e-6)
    assert "not asked" not in repr(far)
