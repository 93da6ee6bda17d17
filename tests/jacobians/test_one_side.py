"""Norms of heads as functions of their keys, values or queries alone, against autograd."""

import math

import pytest
import torch
from support import hard_heads, mp_oracle
from support.oracles import encloses
from support.variants import MASKS, VARIANTS, cross, layer
from torch import Tensor

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.attention.reference import head_function
from lipbound.jacobians.maps import SIDE_OF
from lipbound.jacobians.prepared_map import PreparedMap

EACH = sorted(SIDE_OF)


def jacobian(att: Attention, s: int, h: int, wrt: str, map: str = "head") -> Tensor:
    """The autograd Jacobian of the definition by the vectors of a side, padding left out."""
    att, side = att.double(), SIDE_OF[wrt]
    real = att.valid_rows if side == "q" else att.valid_keys
    x = att.x[s] if att.valid is None else att.x[s][att.valid[s]]
    point = {"q": att.wide_q, "k": att.wide_k, "v": att.wide_v}[side][s, h]
    f = head_function(att, s, h)

    def moved(y: Tensor) -> Tensor:
        out = f(x, **{side: y})
        return out if map == "head" else out @ att.w_o[h]

    found = torch.func.jacrev(moved)(point if real is None else point[real[s]])
    return found.reshape(found.shape[0] * found.shape[1], -1)


def norms(att: Attention, wrt: str, map: str = "head") -> Tensor:
    return torch.stack(
        [
            torch.stack([torch.linalg.matrix_norm(jacobian(att, s, h, wrt, map), 2)
                         for h in range(att.heads)])
            for s in range(att.samples)
        ]
    )  # fmt: skip


def check(att: Attention, wrt: str, map: str) -> None:
    exact, measured = norms(att, wrt, map), PreparedMap(att, map, side=SIDE_OF[wrt])
    error = measured.roundoff.tensors.view(exact.shape) * 2.0**measured.exponents
    assert bool((error < 1e-8).all())
    dense = lb.spectral_norm(att, map=map, wrt=wrt, method="dense")
    found = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-9, delta=1e-6)
    estimate = lb.spectral_norm(att, map=map, wrt=wrt, tol=1e-9)
    for norm in (dense, found, estimate):
        assert encloses(norm, exact, 1e-9, error)
    assert bool(torch.isfinite(found.upper).all())


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
@pytest.mark.each_value
def test_every_variant(variant: str, mask: str, wrt: str, map: str) -> None:
    check(layer(3, frozenset({variant}) - {"plain"}, mask=mask), wrt, map)


@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("seed", range(2))
def test_variants_together(seed: int, wrt: str) -> None:
    has = frozenset({"rotation", "norm", "cap", "sinks", "values", "gate"})
    check(layer(seed, has, mask="padded"), wrt, "head_out")


@pytest.mark.parametrize("map", ["head", "head_out"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("stream", ["queries", "memory"])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention(stream: str, wrt: str, map: str, padded: bool) -> None:
    check(cross(1, stream, has=frozenset({"cap"}), padded=padded), wrt, map)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("wrt", EACH)
@pytest.mark.parametrize("family", hard_heads.FAMILIES)
def test_enclosures_hold_where_rounding_does_its_worst(
    family: str, wrt: str, dtype: torch.dtype
) -> None:
    att = hard_heads.FAMILIES[family](torch.Generator().manual_seed(7), dtype)
    att = att.select(slice(0, 2))
    for map in ["head"] if att.w_o is None else ["head", "head_out"]:
        exact = mp_oracle.norms(att, map, SIDE_OF[wrt])
        for method, delta in (("dense", None), ("lanczos", 1e-9)):
            norm = lb.spectral_norm(att, map=map, wrt=wrt, method=method, tol=1e-6, delta=delta)
            for s, h in torch.cartesian_prod(torch.arange(att.samples), torch.arange(att.heads)):
                assert float(norm.lower[s, h]) <= exact[s][h].upper
                assert float(norm.upper[s, h]) >= exact[s][h].lower
