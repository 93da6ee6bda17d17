"""Runs on disk: what can be saved, what cannot be read, and that no work is lost."""

import os
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import lipbound as lb
from lipbound.errors import AlteredRunError, DamagedRunWarning, LipboundError, StoreError
from lipbound.runs import store


@pytest.mark.parametrize("name", ["bits.zarr", "bits.nc"])
def test_studies_are_loaded_as_they_were_saved(tmp_path: Path, name: str) -> None:
    study = xr.Dataset({"norm": ("head", [1.0, 2.0])}, attrs={"lipbound": "0.1.0", "error": 0.01})
    path = lb.save(study, tmp_path / name)
    assert lb.load(path).identical(study)
    with pytest.raises(StoreError, match="holds other data of lipbound, not a run of"):
        lb.load(path, damaged="refuse")


def test_netcdf_and_back(whole: xr.Dataset, tmp_path: Path) -> None:
    """Everything, attributes of any type among it; checked against the same checksums."""
    path = lb.save(whole, tmp_path / "run.nc")
    assert path.is_file()
    with xr.open_dataset(path) as plain:
        np.testing.assert_array_equal(plain["exact"], whole["exact"])  # any other program reads it
        assert plain.attrs["model"] == whole.attrs["model"]
    ds = store.load(path, damaged="refuse")
    assert ds.identical(whole)
    assert (ds.attrs["commit"], ds.attrs["versions"], ds.attrs["tol"]) == (
        None,
        whole.attrs["versions"],
        1e-3,
    )
    with xr.open_dataset(path) as plain:
        edited = plain.load()
    edited["yudin"][1, 0, 2] *= 2
    edited.to_netcdf(tmp_path / "edited.nc")
    with pytest.warns(DamagedRunWarning, match="its numbers at sample 1 layer 0 are not those"):
        lb.load(tmp_path / "edited.nc")


def test_what_could_not_be_loaded_is_not_saved(whole: xr.Dataset, tmp_path: Path) -> None:
    for ds, message in (
        (None, "a run is wanted, not None"),
        (whole["exact"], "a run is wanted, not of type DataArray"),
        (whole[["exact"]], "'yudin' is missing; keep"),
        (whole.isel(layer=0), "no table of numbers by sample, layer and head"),
    ):
        with pytest.raises(StoreError, match=message):
            lb.save(ds, tmp_path / "run.zarr")
    with pytest.raises(LipboundError, match=r"and a run is a folder of its own kind; name it"):
        lb.save(whole, tmp_path / "run.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.zarr", "run.nc"])
def test_a_full_disk_leaves_nothing_behind(
    name: str, whole: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: xr.Dataset, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full)
    monkeypatch.setattr(xr.Dataset, "to_netcdf", full)
    with pytest.raises(StoreError, match="could not be written: No space left on device"):
        lb.save(whole, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, stores and netCDF files of other programs, folders that may not be read, names that no
    system takes."""
    (tmp_path / "words.txt").write_text("the ferry")
    (tmp_path / "empty.nc").write_bytes(b"")
    other = xr.Dataset({"a": ("x", [1.0])})
    other.to_netcdf(tmp_path / "other.nc")
    other.to_zarr(tmp_path / "other.zarr", zarr_format=2, consolidated=False)
    for name, message in (
        ("words.txt", "is not a run of lipbound: it is a file of another kind"),
        ("empty.nc", "is not a run of lipbound"),
        ("other.nc", "is not a run of lipbound: it is a file of another kind"),
        ("other.zarr", "is not a run of lipbound: it has no settings of one"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        with pytest.raises(StoreError, match=message) as error:
            lb.load(tmp_path / name)
        assert "\n" not in str(error.value)

    def locked(self: Path) -> None:
        raise PermissionError(13, os.strerror(13))

    (tmp_path / "locked.zarr").mkdir()
    monkeypatch.setattr(Path, "iterdir", locked)
    with pytest.raises(StoreError, match=r"locked\.zarr cannot be read: Permission denied"):
        lb.load(tmp_path / "locked.zarr")


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_run_without_its_description(
    content: str | None, whole: xr.Dataset, tmp_path: Path
) -> None:
    """Its values are there, so it is a damaged run and not anything else."""
    description = lb.save(whole, tmp_path / "run.zarr") / "zarr.json"
    description.unlink() if content is None else description.write_text(content)
    with pytest.raises(AlteredRunError, match=r"run\.zarr is damaged: a part of it cannot be read"):
        lb.load(tmp_path / "run.zarr")


def test_folders_of_runs_and_names_of_unfinished_ones(whole: xr.Dataset, tmp_path: Path) -> None:
    """A folder that holds runs is not a damaged one; no run is made under the name of an unfinished
    one, nor is that advised."""
    lb.save(whole, tmp_path / "runs" / "a.zarr")
    (tmp_path / "empty").mkdir()
    for name, message in (
        (
            "runs",
            r"runs is not a run of lipbound: it is a folder of runs \(a\.zarr\); name one of them",
        ),
        ("empty", r"empty is not a run of lipbound: there is no Zarr store in it"),
        ("runs/b.zarr.partial", r"there is no run .*b\.zarr\.partial; .* --out .*b\.zarr` makes"),
    ):
        with pytest.raises(StoreError, match=message):
            lb.load(tmp_path / name)
    with pytest.raises(StoreError, match=r"choose a name that does not end in \.partial"):
        lb.save(whole, tmp_path / "c.zarr.partial")
