import pytest
import torch
from support.layers import HARD, random_attention
from support.oracles import assembled, jacobians

from lipbound.attention.layer import Attention
from lipbound.jacobians import gram as gram_module
from lipbound.jacobians.gram import Gram


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("tile", [2**23, 3000])
@pytest.mark.parametrize("stacking", ["head", "heads", "layer"])
def test_gram_is_the_product_of_autograd_jacobians(
    att: Attention, stacking: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gram_module.TILE, "cpu", tile)
    for s in range(att.samples):
        j = jacobians(att, s)
        heads = [1] if stacking == "head" else [0, 1, 2]
        g = Gram(att, s, heads, att.w_o if stacking == "layer" else None)
        j = torch.einsum("nhvx,hvo->nox", j, att.w_o) if stacking == "layer" else j[:, heads]
        j = j.reshape(g.tokens * g.width, -1)
        reference = j @ j.mT
        assert float(
            torch.linalg.matrix_norm(assembled(g) - reference, 2)
        ) <= g.error + 1e-14 * float(reference.norm())
        y = torch.randn(
            g.tokens, g.width, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        torch.testing.assert_close(
            g.apply(y).reshape(-1, 3),
            reference @ y.reshape(-1, 3),
            rtol=0,
            atol=1e-12 * float(reference.norm() * y.norm()),
        )


def test_the_allowance_does_not_depend_on_the_sign_of_the_scale() -> None:
    att = random_attention("plain")
    flipped = Attention(att.x, att.w_q, -att.w_k, att.w_v, scale=-att.scale)
    assert Gram(flipped, 0, [0]).error == pytest.approx(Gram(att, 0, [0]).error)


def test_the_allowance_for_rounding_is_small() -> None:
    g = Gram(random_attention("plain"), 0, [0])
    assert 0 < g.error < 1e-12 * float(assembled(g).norm())
