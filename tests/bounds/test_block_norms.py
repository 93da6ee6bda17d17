"""What our bounds on plain heads make of every row of P: never below norms of the matrices
themselves, and hardly above."""

import pytest
import torch
from support.variants import MASKS, layer

from lipbound.attention.layer import Attention
from lipbound.bounds.ours import block_norms
from lipbound.bounds.ours.block_norms import BlockNorms

LEAST = 1 - 1e-13


@pytest.mark.parametrize("at_once", [1, 3, 9])
@pytest.mark.parametrize("mask", MASKS)
def test_norms_are_those_of_the_matrices(
    mask: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_norms, "ROW_BYTES", 8 * 3 * 3 * 4 * at_once)
    att = layer(1, frozenset(), mask=mask, n=9, samples=1)
    if att.valid is not None:
        att = att.unpadded(0)
    with torch.no_grad():
        found = BlockNorms(att, gram=True)
    p, k, v, q = (t[0] for t in (att.p, att.centred_k, att.centred_v, att.scale * att.q))
    a = p[..., None] * (v[:, None] - (p @ v)[:, :, None])  # (heads, i, j, d_v)
    steep = att.scale * torch.einsum("hija,hjc,hdc->hiad", a, k, att.w_q)  # B_i, (heads, i, d_v, D)
    through = torch.einsum("hkc,hdc->hkd", q, att.w_k)  # q~_k
    seen = torch.einsum("hiad,hkd->hika", steep, through).norm(dim=-1)
    for name, true in (
        ("a", torch.linalg.matrix_norm(a, 2)),
        ("b", torch.linalg.matrix_norm(steep, 2)),
        ("b_v", torch.linalg.matrix_norm(steep @ att.w_v[:, None], 2)),
        ("b_q", torch.where(p.mT > 0, seen, 0.0)),
    ):
        value = getattr(found, name)
        assert bool((value >= true * LEAST).all()), name
        above = 1e-3 if name == "b_q" else 2e-2  # norms of blocks are rounded upwards
        where = p.mT > 0 if name == "b_q" else torch.ones_like(value, dtype=torch.bool)
        assert bool((value <= true * (1 + above) + 1e-4 * true.amax())[where].all()), name
    if mask == "causal":
        assert bool((found.b_q[:, 4, :3] == 0).all()) or at_once == 9


def many_small(n: int) -> torch.Tensor:
    """n numbers most of which a sum of squares rounds down one after the other."""
    x = torch.full((n,), 2.0**-27.51, dtype=torch.float64)
    x[:7] = 7**-0.5
    return x


def test_values_wider_than_queries() -> None:
    """Images of queries are lengths of d_v numbers, whatever d is."""
    one, x = (
        torch.ones(1, 1, 1, dtype=torch.float64),
        torch.tensor([[[0.5], [1.0]]], dtype=torch.float64),
    )
    att = Attention(x, one, one, many_small(2000).view(1, 1, -1), scale=1.0)
    p, v, k = att.p[0, 0], att.centred_v[0, 0], att.centred_k[0, 0]
    cov = torch.einsum("ij,ijv,ja->iva", p, v - (p @ v)[:, None], k)
    with torch.no_grad():
        found = BlockNorms(att, gram=True).b_q[0]
    true = torch.einsum("iva,ka->ikv", cov, att.q[0, 0]).norm(dim=-1)
    assert bool((found >= true * LEAST).all())
    assert bool((found <= true * (1 + 1e-3)).all())


@pytest.mark.parametrize("exponent", [-10, -60, -70, -80, -200])
def test_rows_that_leave_next_to_nothing(exponent: int) -> None:
    """Squares of their probabilities are tiny, and the key that has the rest has the value
    zero."""
    small = 2.0**exponent
    p = torch.tensor([[[1 - 2 * small, small, small]]], dtype=torch.float64)
    v = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    with torch.no_grad():
        found = block_norms.own_norms(p, v, p @ v)
    true = float(torch.linalg.matrix_norm(p[0, 0][:, None] * (v[0] - p[0] @ v[0]), 2))
    assert true <= float(found) <= true * (1 + 2e-2) + 1e-18
