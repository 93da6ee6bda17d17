"""Frobenius norms and condition numbers as variables of a run."""

import numpy as np
import pytest
import torch
from support.oracles import jacobians

import lipbound as lb
from lipbound.runs.checksums import faults
from lipbound.runs.config import RunConfig

TEXTS = ["a b c", "b c d e f"]
OPTIONS = {"progress": False, "max_length": 8, "bounds": "yudin"}


@pytest.fixture(scope="module")
def run(bert, tmp_path_factory):
    path = tmp_path_factory.mktemp("extras") / "run.zarr"
    lb.compare(bert, TEXTS, extras="frobenius, condition", exact_samples=1, out=path, **OPTIONS)
    return path


def test_variables_are_those_of_the_dense_jacobian(run, bert):
    ds = lb.load(run)
    assert ds.attrs["extras"] == ["frobenius", "condition"]
    assert {"jacobian_frobenius", "jacobian_condition"} <= set(ds.attrs["made"]["variables"])
    checkpoint = lb.load_checkpoint(bert)
    inputs = lb.prepare(checkpoint, TEXTS, max_length=8)
    for i, att in enumerate(lb.capture(checkpoint.model, inputs.block(0, 1, "cpu"))):
        for h, j in enumerate(jacobians(att.double(), 0).transpose(0, 1)):
            values = torch.linalg.svdvals(j.flatten(0, 1))
            place = {"sample": 0, "layer": i, "head": h}
            exact = float(values.square().sum().sqrt())
            assert float(ds["jacobian_frobenius"].isel(place)) == pytest.approx(exact, rel=1e-6)
            ratio = float(values[0] / values[-1])
            found = float(ds["jacobian_condition"].isel(place))
            if ratio < 1e6 or found < np.inf:
                assert found == pytest.approx(ratio, rel=0.02)
    without = ds.isel(sample=1)
    assert bool((without["jacobian_frobenius"].isnull() & without["exact"].isnull()).all())
    assert bool((ds["jacobian_frobenius"] >= ds["exact"]).isel(sample=0).all())


def test_they_are_verified_and_guarded(run):
    assert lb.verify(run, data=TEXTS, places=2).ok
    ds = lb.load(run)
    ds["jacobian_frobenius"][0, 0, 0] *= 1.01
    assert faults(ds) == ["its numbers at sample 0 layer 0 are not those that were computed"]
    found = lb.verify(ds, data=TEXTS, places=8)
    assert any("jacobian_frobenius" in str(problem) for problem in found.problems)


def test_what_is_too_large_is_told():
    """300 tokens of width 4 are more than 1,024 outputs."""
    given = [lb.Attention(*(torch.randn(s) for s in ((1, 300, 8), *[(2, 8, 4)] * 3)))]
    with pytest.warns(lb.Notice, match="jacobian_condition is missing at 2 of 2 exact norms"):
        ds = lb.compare(given, bounds="none", extras=["condition"], progress=False)
    assert bool(ds["jacobian_condition"].isnull().all())
    assert any("jacobian_condition" in note for note in ds.attrs["notes"])


def test_a_name_counts_once():
    assert RunConfig("builtin:minilm", extras="frobenius,frobenius").extras == ("frobenius",)
