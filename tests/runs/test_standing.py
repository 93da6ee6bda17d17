"""What a Dataset that is shown holds, whatever was done to the run since it was made."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from support.runs import OPTIONS, TEXTS

import lipbound as lb
from lipbound import tables
from lipbound.errors import StoreError
from lipbound.runs import store
from lipbound.runs.provenance import damage, repeated
from lipbound.runs.run_argument import run_of
from lipbound.runs.standing import closed, origins, standing


def test_a_run_as_it_was_made(whole: xr.Dataset) -> None:
    found = standing(whole)
    assert (found.samples, found.samples_made, found.exact_samples) == (4, 4, 4)
    assert (found.layers, found.model_layers, found.all_layers, found.heads, found.heads_made) == (
        (0, 1),
        2,
        True,
        (4, 4),
        4,
    )
    assert (found.tokens, found.norms, found.closed, found.all_closed) == (
        int(whole["length"].max()),
        32,
        32,
        True,
    )
    assert (found.edited, found.runs) == (False, 1)


@pytest.mark.parametrize(
    ("part", "samples", "layers", "heads"),
    [
        (lambda ds: ds.isel(sample=[1]), 1, (0, 1), 4),
        (lambda ds: ds.sel(sample=[3, 0], layer=[1]), 2, (1,), 4),
        (lambda ds: ds.isel(head=[1, 2]), 4, (0, 1), 2),
        (lambda ds: ds.isel(sample=2), 1, (0, 1), 4),
        (lambda ds: ds.isel(layer=1, head=0), 4, (1,), 1),
        (lambda ds: ds.transpose("head", "layer", "sample"), 4, (0, 1), 4),
    ],
    ids=["a sample", "samples and layers", "heads", "an axis gone", "two axes gone", "other axes"],
)
def test_parts_are_as_they_were_computed(
    part: object, samples: int, layers: tuple, heads: int, whole: xr.Dataset, tmp_path: Path
) -> None:
    """Of how many they are a part is known, and they can be saved, loaded and checked."""
    assert callable(part)
    ds = run_of(part(whole))
    found = standing(ds)
    assert (
        found.samples,
        found.samples_made,
        found.layers,
        found.model_layers,
        found.heads,
        found.heads_made,
    ) == (
        samples,
        4,
        layers,
        2,
        (heads, heads),
        4,
    )
    assert found.edited is False
    assert damage(ds) == ""
    assert store.load(lb.save(ds, tmp_path / "part.zarr"), damaged="refuse").identical(ds)


def test_what_was_edited_is_called_edited(whole: xr.Dataset, bert: Path) -> None:
    other = lb.compare(bert, TEXTS[::-1], **OPTIONS)
    assert standing(whole * 2).edited is True
    assert standing(whole.where(whole["exact"] > 1.2)).edited is True
    assert standing(whole.assign_attrs(tol=0.1)).edited is True
    assert standing(whole.assign_coords(layer=[1, 2])).edited is True
    assert (
        standing(
            whole.assign_coords(layer_name=("layer", np.array(["a", "b"], dtype=object)))
        ).edited
        is True
    )
    assert standing(whole.drop_vars("checksum")).edited is True
    joined = xr.concat([whole, other], "sample")
    assert (standing(joined).edited, repeated(joined), repeated(whole)) == (True, ["sample"], [])
    unlike = xr.concat(
        [whole.isel(sample=[0]), other.isel(sample=[1])], "sample"
    )  # no number is there twice
    assert standing(unlike).edited is True
    assert (
        standing(whole[["exact", "exact_upper", "yudin"]]).edited is None
    )  # its checksums are over all variables
    assert standing(whole.assign(mine=whole["exact"])).edited is False


def test_layers_of_how_many(bert: Path) -> None:
    ds = lb.compare(bert, TEXTS[:1], **OPTIONS | {"layers": [1]})
    found = standing(ds)
    assert (found.layers, found.model_layers, found.all_layers) == ((1,), 2, False)


def test_what_did_not_close_is_counted(bert: Path) -> None:
    """A tolerance below what float32 products can reach."""
    ds = lb.compare(bert, TEXTS[:1], **OPTIONS | {"tol": 1e-15})
    found = standing(ds)
    width = ds["exact_upper"] / ds["exact"] - 1
    assert found.closed == int((width <= 1e-15).sum()) < found.norms == 8
    np.testing.assert_array_equal(closed(ds), width <= 1e-15)
    few = lb.compare(bert, TEXTS[:2], **OPTIONS | {"exact_samples": 1})
    assert (
        standing(few).samples,
        standing(few).exact_samples,
        standing(few.isel(sample=[1])).exact_samples,
    ) == (2, 1, 0)


def test_arithmetic_on_runs(bert: Path, whole: xr.Dataset) -> None:
    """Flags are no quantities: they do not stand in the way, and are left alone."""
    other = lb.compare(bert, TEXTS[::-1], **OPTIONS)
    difference = other - whole
    np.testing.assert_array_equal(
        difference["exact"], other["exact"].values - whole["exact"].values
    )
    doubled = 2 * whole
    assert doubled["exact_converged"].dtype == whole["yudin_sound"].dtype == bool
    assert doubled["yudin_sound"].identical(whole["yudin_sound"])
    with pytest.raises(StoreError, match=r"no longer a run: .* as after arithmetic on two runs"):
        tables.summary(difference)
    with pytest.raises(StoreError, match="is missing, which arithmetic on two runs drops"):
        tables.summary(whole.drop_vars("yudin_sound"))


def test_runs_of_before_have_their_flags_among_their_variables(
    whole: xr.Dataset, tmp_path: Path
) -> None:
    """And no record of what they were made with: they load, and nothing is claimed about their
    checksums."""
    former = whole.reset_coords(["yudin_sound", "lipbound_sound", "exact_converged", "checksum"])
    del former.attrs["made"]
    former["checksum"] = former["checksum"].isel(head=0).astype("int64")
    former.to_zarr(tmp_path / "run.zarr", consolidated=False)
    ds = store.load(tmp_path / "run.zarr", damaged="refuse")
    assert {"yudin_sound", "lipbound_sound", "exact_converged"} <= set(ds.coords)
    found = standing(ds)
    assert (found.edited, found.samples_made, found.model_layers, found.all_layers, found.runs) == (
        None,
        None,
        None,
        None,
        1,
    )
    assert origins(ds) == [ds.attrs]
    assert "no checksums" in lb.verify(ds, places=1, data=TEXTS).notes[0]
