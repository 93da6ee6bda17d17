"""Bits of cached keys and values: the quantiser, predictions against dense Jacobians and against
rounding itself."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from support.checks import normal
from support.reference import head_function
from support.variants import VARIANTS, layer

import lipbound as lb
from lipbound.analysis import cache_bits as study

BITS = (2, 4, 8, 12)
GROUPS = {"keys": "channel", "values": "token"}


@pytest.fixture(scope="module")
def ds():
    return lb.cache_bits("builtin:gpt2", samples=2, max_length=12, bits=BITS, dtype="float64")


@pytest.mark.parametrize("group", ["token", "channel"])
@pytest.mark.parametrize("bits", [1, 2, 5])
def test_rounding_is_to_so_many_levels_and_by_half_a_step(bits, group):
    y = normal()(2, 3, 40, 40)
    found, axis = study.rounded(y, bits, group), study.GROUPS[group]
    assert bool(((found - y).abs() <= study.half_steps(y, group) / (2**bits - 1) + 1e-15).all())
    for one in found.movedim(axis, -1).flatten(0, -2):
        assert len(one.mul(1e12).round().unique()) <= 2**bits
    for end in (torch.amax, torch.amin):
        assert torch.allclose(end(found, axis), end(y, axis), atol=1e-15)
    assert torch.allclose(study.rounded(found, bits, group), found, atol=1e-14)


def test_equal_numbers_are_not_rounded():
    y = torch.full((1, 4, 5), 0.3, dtype=torch.float64)
    assert torch.equal(study.rounded(y, 3, "token"), y)


@pytest.mark.parametrize("variant", ["plain", *VARIANTS])
def test_predictions_and_what_is_measured(variant, monkeypatch):
    """Predictions are those of the dense Jacobian, and outputs move as those of the definition at
    rounded keys and values: of values no further than the bound, of keys at many bits."""
    # orthogonal signs: the mean of as many squares is that of all
    probes = itertools.cycle(torch.from_numpy(hadamard(32)) > 0)
    monkeypatch.setattr(study, "PROBES", 32)

    def signs(low, high, shape, generator):
        return next(probes)[: shape[2:].numel()].view(shape[2:]).expand(shape)

    att = layer(3, frozenset({variant}) - {"plain"}, mask="causal", samples=1, n=7)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", signs)
        found = study._of_layer(att, GROUPS, BITS, 0.01, 1e-6, 0)
    for i, (side, y) in enumerate({"keys": att.wide_k, "values": att.wide_v}.items()):
        reach, moved = study.half_steps(y, GROUPS[side])[0], study.rounded(y, 4, GROUPS[side])[0]
        for h in range(att.heads):
            f = partial(head_function(att, 0, h), att.x[0])
            j = torch.func.jacrev(lambda t: f(**{side[0]: t}))(y[0, h]).flatten(0, 1)  # noqa: B023
            out = f().norm()
            norm = torch.linalg.matrix_norm(j.flatten(1), 2)
            bound, expected = norm * reach[h].norm() / out, (j * reach[h]).norm() / 3**0.5 / out
            assert float(found["norm"][i, h]) == pytest.approx(float(norm), rel=2e-3)
            for kind, size, rel in (("bound", bound, 2e-3), ("expected", expected, 1e-9)):
                for b, bits in enumerate(BITS):
                    steps = 2**bits - 1
                    assert float(found[kind][i, h, b]) * steps == pytest.approx(float(size), rel)
                steps = 2.0 ** float(found[f"bits_{kind}"][i, h]) - 1
                assert float(size) / steps == pytest.approx(0.01, rel)
            relative = float((f(**{side[0]: moved[h]}) - f()).norm() / out)
            assert float(found["measured"][i, h, 1]) == pytest.approx(relative, rel=1e-8, abs=1e-12)
    assert bool((found["measured"][1] <= found["bound"][1]).all())
    assert bool((found["measured"][0, :, -1] <= 1.01 * found["bound"][0, :, -1]).all())


def test_padding_is_left_out():
    att = layer(2, frozenset({"rotation"}), mask="padded", n=6)
    part = study._of_layer(att.select(slice(1, 2)), GROUPS, BITS, 0.01, 1e-6, 0)
    whole = study._of_layer(att.unpadded(1), GROUPS, BITS, 0.01, 1e-6, 0)
    for name in study.VARIABLES:
        assert torch.allclose(part[name], whole[name])


def test_a_study(ds):
    checkpoint = lb.load_checkpoint("builtin:gpt2", dtype="float64")
    atts = lb.capture(checkpoint.model, lb.prepare(checkpoint, samples=2, max_length=12))
    sizes = {"side": 2, "bits": len(BITS), "sample": 2, "layer": len(atts), "head": atts[0].heads}
    assert dict(ds.sizes) == sizes
    for side in ("keys", "values"):
        exact = [lb.spectral_norm(att, wrt=side, method="dense").upper for att in atts]
        np.testing.assert_allclose(ds["norm"].sel(side=side), torch.stack(exact, 1), rtol=1e-3)
    assert ds.attrs["quantiser"]["keys"] == "asymmetric round-to-nearest, by channel"
    assert ds.attrs["error"] == 0.01


def test_agreement_counts_and_ranks(ds):
    table = study.agreement(ds).set_index(["side", "bits"])
    at = ds.sel(side="keys", bits=4)
    assert table.loc[("keys", 4), "measured"] == pytest.approx(float(at["measured"].median()))
    above = float((at["measured"] > at["bound"]).mean())
    assert table.loc[("keys", 4), "above"] == above
    ranks = [t.values.ravel().argsort().argsort() for t in (at["expected"], at["measured"])]
    corr = np.corrcoef(ranks)[0, 1]
    assert table.loc[("keys", 4), "rank_expected"] == pytest.approx(corr)


def test_the_ranking_has_all_heads_in_order(ds):
    for kind in study.KINDS:
        heads = study.ranking(ds, by=kind)
        places = {(row["layer"], row["head"]) for row in heads}
        assert places == {(i, h) for i in range(ds.sizes["layer"]) for h in range(ds.sizes["head"])}
        total = [row[f"keys_{kind}"] + row[f"values_{kind}"] for row in heads]
        assert total == sorted(total, reverse=True)
    first = heads[0]
    at = ds["bits_bound"].sel(side="keys", layer=first["layer"]).isel(head=first["head"])
    assert first["keys_bound"] == pytest.approx(float(at.max()))
    assert len(study.agreement(ds)) == 2 * len(BITS)
