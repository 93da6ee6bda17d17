"""Contents and settings of runs and parts of them, whatever was done to them since."""

import numpy as np
import pytest
import xarray as xr
from support.commands import refused
from support.runs import OPTIONS, TEXTS

import lipbound as lb
from lipbound.runs.checksums import edited, faults
from lipbound.runs.store import run_of
from lipbound.schema import Contents, closed, repeated


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
def test_parts_are_as_they_were_computed(part, samples, layers, heads, whole, tmp_path):
    """Of how many they are a part is known, and they can be saved, loaded and checked."""
    ds = run_of(part(whole))
    found = Contents.of(ds)
    assert (found.samples, found.made.samples) == (samples, 4)
    assert (found.layers, found.made.model_layers) == (layers, 2)
    assert (found.heads, found.made.heads) == ((heads, heads), 4)
    assert edited(ds) is False
    assert faults(ds) == []
    assert lb.load(lb.save(ds, tmp_path / "part.zarr"), damaged="refuse").identical(ds)


def test_what_was_edited_is_called_edited(whole, bert):
    other = lb.compare(bert, TEXTS[::-1], **OPTIONS)
    names = "layer", np.array(["a", "b"], dtype=object)
    for changed in (
        whole * 2,
        whole.where(whole["exact"] > 1.2),
        whole.assign_attrs(tol=0.1),
        whole.assign_coords(layer=[1, 2]),
        whole.assign_coords(layer_name=names),
        whole.drop_vars("checksum"),
    ):
        assert edited(changed) is True
    joined = xr.concat([whole, other], "sample")
    assert (edited(joined), repeated(joined), repeated(whole)) == (True, ["sample"], [])
    # no number is there twice
    unlike = xr.concat([whole.isel(sample=[0]), other.isel(sample=[1])], "sample")
    assert edited(unlike) is True
    # its checksums are over all variables
    assert edited(whole[["exact", "exact_upper", "yudin"]]) is None
    assert edited(whole.assign(mine=whole["exact"])) is False


def test_what_did_not_close_is_counted(bert):
    """A tolerance below what float32 products can reach."""
    ds = lb.compare(bert, TEXTS[:1], **OPTIONS | {"tol": 1e-15})
    found = Contents.of(ds)
    width = ds["exact_upper"] / ds["exact"] - 1
    assert found.closed == int((width <= 1e-15).sum()) < found.norms == 8
    np.testing.assert_array_equal(closed(ds), width <= 1e-15)
    few = lb.compare(bert, TEXTS[:2], **OPTIONS | {"exact_samples": 1})
    assert (Contents.of(few).samples, Contents.of(few).exact_samples) == (2, 1)
    assert Contents.of(few.isel(sample=[1])).exact_samples == 0


def test_arithmetic_on_runs(bert, whole):
    """Flags are no quantities: they do not stand in the way, and are left alone."""
    other = lb.compare(bert, TEXTS[::-1], **OPTIONS)
    difference = other - whole
    expected = other["exact"].values - whole["exact"].values
    np.testing.assert_array_equal(difference["exact"], expected)
    doubled = 2 * whole
    assert doubled["exact_converged"].dtype == whole["yudin_sound"].dtype == bool
    assert doubled["yudin_sound"].identical(whole["yudin_sound"])
    for lost in (difference, whole.drop_vars("yudin_sound")):
        words = "no longer one: ", " is missing; ", "arithmetic on two runs drops"
        refused(lambda lost=lost: lb.tables.summary(lost), *words, error=lb.errors.StoreError)
