"""What our bounds on plain heads make of every row of P: never below norms of the matrices themselves, and hardly above, in float32 too."""

import pytest
import torch
from support.variants import MASKS, layer

from lipbound import bounds
from lipbound.bounds.lipbound2026 import row_norms
from lipbound.bounds.lipbound2026.parts import BlockNorms

LEAST = 1 - 1e-13


@pytest.mark.parametrize("at_once", [1, 3, 9])
@pytest.mark.parametrize("work", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_norms_are_those_of_the_matrices(mask: str, work: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_norms, "reproducible_float32", lambda: work == torch.float32)
    monkeypatch.setattr(row_norms, "ROW_BYTES", 8 * 3 * 3 * 4 * at_once)
    att = layer(1, frozenset(), mask=mask, n=9, samples=1)
    if att.valid is not None:
        att = att.unpadded(0)
    with torch.no_grad():
        found = BlockNorms(att, 0, slice(None), gram=True)
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


@pytest.mark.parametrize("mask", MASKS)
def test_float32_hardly_moves_the_bounds(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {}
    for narrow in (True, False):
        monkeypatch.setattr(row_norms, "reproducible_float32", lambda narrow=narrow: narrow)
        with torch.no_grad():
            values[narrow] = bounds.evaluate(layer(2, frozenset(), mask=mask, n=9), ["lipbound", "lipbound_block"])
    for name, wide in values[False].items():
        assert bool((values[True][name] >= wide * (1 - 1e-6)).all())
        assert bool((values[True][name] <= wide * (1 + 2e-4)).all())
        assert bool((values[True][name] != wide).any())
