"""Runs on disk: what can be saved, what cannot be read, and that no work is lost."""

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from support.commands import refused

import lipbound as lb
from lipbound.errors import DamagedRunWarning, StoreError


@pytest.mark.parametrize("name", ["bits.zarr", "bits.nc"])
def test_studies_are_loaded_as_they_were_saved(tmp_path, name):
    study = xr.Dataset({"norm": ("head", [1.0, 2.0])}, attrs={"lipbound": "0.1.0", "error": 0.01})
    path = lb.save(study, tmp_path / name)
    assert lb.load(path).identical(study)
    words = "holds other data of lipbound, not a run of"
    refused(lambda: lb.load(path, damaged="refuse"), words, error=StoreError)


def test_netcdf_and_back(whole, tmp_path):
    """Everything, attributes of any type among it; checked against the same checksums."""
    path = lb.save(whole, tmp_path / "run.nc")
    assert path.is_file()
    with xr.open_dataset(path) as plain:
        np.testing.assert_array_equal(plain["exact"], whole["exact"])  # any other program reads it
        assert plain.attrs["model"] == whole.attrs["model"]
    ds = lb.load(path, damaged="refuse")
    assert ds.identical(whole)
    for name, value in (("commit", None), ("versions", whole.attrs["versions"]), ("tol", 1e-3)):
        assert ds.attrs[name] == value
    with xr.open_dataset(path) as plain:
        edited = plain.load()
    edited["yudin"][1, 0, 2] *= 2
    edited.to_netcdf(tmp_path / "edited.nc")
    with pytest.warns(DamagedRunWarning, match="its numbers at sample 1 layer 0 are not those"):
        lb.load(tmp_path / "edited.nc")


def test_what_could_not_be_loaded_is_not_saved(whole, tmp_path):
    given = [None, whole["exact"], whole[["exact"]], whole.isel(layer=0)]
    for ds, words in zip(
        given,
        (
            "a run is wanted, not None",
            "a run is wanted, not of type DataArray",
            "'yudin' is missing; keep",
            "no table of numbers by sample, layer and head",
        ),
        strict=True,
    ):
        refused(lambda ds=ds: lb.save(ds, tmp_path / "run.zarr"), words, error=StoreError)
    refused(lambda: lb.save(whole, tmp_path / "run.csv"), "and a run is a folder of its own kind")
    other = lambda: lb.save(whole, tmp_path / "c.zarr.partial")  # noqa: E731
    refused(other, "choose a name that does not end in .partial", error=StoreError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.zarr", "run.nc"])
def test_a_full_disk_leaves_nothing_behind(name, whole, tmp_path, monkeypatch):
    def full(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full)
    monkeypatch.setattr(xr.Dataset, "to_netcdf", full)
    with pytest.raises(StoreError, match="could not be written: No space left on device"):
        lb.save(whole, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_run(whole, tmp_path, monkeypatch):
    """Text, stores and netCDF files of other programs, folders of runs and folders that may not be
    read, names that no system takes, and what could be an unfinished run."""
    lb.save(whole, tmp_path / "runs" / "a.zarr")
    for name in ("empty", "locked.zarr"):
        (tmp_path / name).mkdir()
    (tmp_path / "words.txt").write_text("the ferry")
    (tmp_path / "empty.nc").write_bytes(b"")
    other = xr.Dataset({"a": ("x", [1.0])})
    other.to_netcdf(tmp_path / "other.nc")
    other.to_zarr(tmp_path / "other.zarr", zarr_format=2, consolidated=False)
    for name, words in {
        "words.txt": "is not a run of lipbound: it is a file of another kind",
        "empty.nc": "is not a run of lipbound",
        "other.nc": "is not a run of lipbound: it is a file of another kind",
        "other.zarr": "is not a run of lipbound: it has no settings of one",
        "x" * 300: "cannot be read: File name too long",
        "runs": "is not a run of lipbound: it is a folder of runs (a.zarr); name one of them",
        "empty": "is not a run of lipbound: there is no Zarr store in it",
        "runs/b.zarr.partial": "there is no run ",
        "none.zarr": "there is no run ",
    }.items():
        refused(lambda name=name: lb.load(tmp_path / name), words, error=StoreError)

    def locked(self):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "iterdir", locked)
    words = "locked.zarr cannot be read: Permission denied"
    refused(lambda: lb.load(tmp_path / "locked.zarr"), words, error=StoreError)
