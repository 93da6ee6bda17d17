"""Runs in the norms that tell tokens apart: their numbers, what they refuse, what they record, and
that they say their norm."""

import numpy as np
import pytest
from support import token_oracle
from support.commands import refused
from support.runs import TEXTS

import lipbound as lb
from lipbound import plots, tables
from lipbound.reporting.labels import facts
from lipbound.runs.config import RunConfig
from lipbound.schema import DRAWN, NORMS, TOKEN_NORMS

OPTIONS = {"max_length": 12, "progress": False}
BOUNDS = {
    "every-token": ["newhouse", "lipbound_every", "lipbound_every_block", "mass_splitting"],
    "one-token": ["lipbound_one"],
}


@pytest.fixture(scope="module", params=TOKEN_NORMS)
def norm(request):
    return request.param


@pytest.fixture(scope="module")
def run(norm, bert, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    lb.compare(bert, text, samples=2, norm=norm, out=path, **OPTIONS)
    return path


@pytest.mark.parametrize(
    "map",
    [
        "head",
        "head_out",
        *(pytest.param(map, marks=pytest.mark.slow) for map in ("heads", "layer")),
    ],
)
def test_numbers_are_those_of_token_norm_and_of_dense_jacobians(norm, map, bert, wide_layers):
    ds = lb.compare(bert, TEXTS, norm=norm, map=map, dtype="float64", layers=[1], **OPTIONS)
    att = wide_layers[1]
    assert ds["exact"].dims == ("sample", "layer", "head")[: 2 + (map in ("head", "head_out"))]
    assert list(ds.attrs["bounds"]) == BOUNDS[norm]
    again = lb.token_norm(att, norm, map=map, tol=ds.attrs["tol"])
    for name, end in (("exact", again.lower), ("exact_upper", again.upper)):
        np.testing.assert_allclose(ds[name][:, 0], end, rtol=1e-9)
    assert bool(ds["exact_converged"].all())
    for s in range(len(TEXTS)):
        place = ds.isel(sample=s, layer=0)
        for h, j in enumerate(token_oracle.blocks(att, s, map)):
            low, high = (float(place[name].values.ravel()[h]) for name in ("exact", "exact_upper"))
            if norm == "every-token":
                below = token_oracle.every_from_below(j, 20)
                above = token_oracle.every_from_above(j)
            else:
                below = above = token_oracle.one(j)[0]
            assert float(below) <= high * (1 + 1e-12)
            assert low <= float(above) * (1 + 1e-9)
            assert high <= low * (1 + 1e-3)
            for name in BOUNDS[norm]:
                assert float(place[name].values.ravel()[h]) >= low
    if map == "head":
        for name, value in lb.bounds.evaluate(att, norm=norm).items():
            np.testing.assert_allclose(ds[name][:, 0], value, rtol=1e-9)
    assert all(entry["violations"] == 0 < entry["compared"] for entry in ds.attrs["audit"].values())


def test_padding_and_blocks_change_nothing(norm, bert):
    options = {"norm": norm, "layers": [0], **OPTIONS}
    whole, single = (lb.compare(bert, TEXTS, memory=most, **options) for most in ("1GB", 1))
    assert (whole.attrs["block"], single.attrs["block"]) == (len(TEXTS), 1)
    for one, other in ((whole, single), (single, whole)):
        # both enclose one number, up to float32 in the model
        assert bool((one["exact"] <= other["exact_upper"] * (1 + 1e-5)).all())
    for name in BOUNDS[norm]:
        np.testing.assert_allclose(whole[name], single[name], rtol=1e-5)


def test_a_run_records_its_norm_and_nothing_that_it_does_not_have(norm, run, bert, text):
    ds = lb.load(run)
    assert ds.attrs["norm"] == norm
    assert not {*DRAWN} & {*ds.attrs}
    assert f"{norm} norm" in ds["exact"].attrs["long_name"]
    assert "exact_l2" not in ds
    config = RunConfig.of(ds)
    assert (config.norm, config.delta, config.seed, config.names) == (norm, None, 0, BOUNDS[norm])
    options = {"samples": 2, "out": run, "resume": True, **OPTIONS}
    assert lb.compare(bert, text, norm=norm, **options).identical(ds)
    words = f"norm was {norm} and is now frobenius"
    refused(lambda: lb.compare(bert, text, **options), words, error=lb.errors.StoreError)


def test_a_run_is_computed_again_in_its_norm(norm, run):
    ds = lb.load(run)
    found = lb.verify(ds, places=4)
    assert found.ok, str(found)
    assert {"exact", "exact_upper", *BOUNDS[norm]} <= set(found.table.index)
    assert f"computed again, in float32 and the {norm} norm: all heads at" in str(found)
    assert lb.verify(ds, places=1, dtype="float64").ok
    ds["exact"][1, 0, 2] *= 0.9
    problems = lb.verify(ds, places=1).problems
    assert any(p.startswith("exact at sample 1, layer 0, head 2: stored ") for p in problems)


def test_the_norm_is_said_wherever_the_map_is(norm, run, tmp_path):
    """And nothing of probabilities, which these norms have not."""
    ds, meaning = lb.load(run), NORMS[norm]
    plots.heatmaps(ds, tmp_path / "figure.png")
    words = f"norm: {norm} ({meaning})"
    for text, there in (
        *((tables.render(ds, form), words) for form in ("text", "markdown", "latex")),
        (plots.caption(ds), f"; {words}; data: "),
        (tables.caption(ds), "enclosed to 0.001, both ends deterministic"),
        (tables.methods(ds, "text"), f"in the {norm} norm, norms of Jacobians ({meaning}), of one"),
        ((tmp_path / "figure.caption.txt").read_text(), words),
    ):
        flat = " ".join(text.replace("% ", "").split())
        assert there in flat
        assert not any(word in flat for word in ("Lanczos", "probability", "seed 0"))
    assert [facts(ds)[name] for name in ("method", "delta", "seed")] == [None] * 3
