"""Runs on disk, one Zarr store each, unfinished ones, and runs as users hand them over."""

import hashlib
import io
import json
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, Self, cast

import numpy as np
import xarray as xr
from filelock import BaseFileLock, FileLock, Timeout
from packaging.version import Version

from lipbound import errors, schema
from lipbound.errors import AlteredRunError, P, StoreError, T, knows_options, one_line, shown, tell
from lipbound.formatting import replacing
from lipbound.runs.checksums import check_whole, faults
from lipbound.runs.config import check_run_name

Run = xr.Dataset | str | Path
"""A run as users hand it over: itself, or its path."""
_TakesRun = Callable[Concatenate[Run, P], T]
PARTIAL = ".partial"
CONFIGURATION, LOCK = "configuration.json", ".lock"
START, LAYER, LENGTHS, ERROR = ".start", ".layer", ".lengths", ".capture_error"
"""Names in a file that are no variables of a run."""
MARK = 32
"""Bytes of the mark that a file begins with."""
NETCDF, JSON = ".nc", "json:"
PLACED: dict[str, tuple[str, ...]] = dict.fromkeys(schema.LAYER_WORDS, ("layer",))
PLACED |= dict.fromkeys(("length", schema.RUN_SAMPLE), ("sample",)) | {schema.RUN: schema.AXES[:2]}
"""Axes of coordinates that have not all of them."""
_SHARED = ("sample", "layer", "head", "length")
"""Coordinates that both runs have alike, and under one name."""
GIVEN = "GivenLayers"
"""Architecture of runs on layers, whose inputs have no fingerprint."""
RATIOS = {
    "ratio": "exact norm of b over that of a, lower ends of both",
    "ratio_lower": "lower end of the ratio",
    "ratio_upper": "upper end of the ratio",
}
"""Variables of a diff besides those of its runs, and what they are."""


def check_target(path: Path) -> Path:
    """Check before any computing that a run can be written to a path, and return it.

    Raises:
        StoreError: it exists already, or its folder cannot be written to.
    """
    if path.name.endswith(PARTIAL):
        raise StoreError(f"choose a name that does not end in {PARTIAL}, as {path} does")
    if path.exists():
        raise StoreError(f"{path} exists already; choose another name, or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {one_line(error)}") from error
    return path


def save(ds: xr.Dataset, path: str | Path) -> Path:
    """Write a run to disk: a Zarr store, or a netCDF file where the name ends in ``.nc``.

    It appears under its name only when it is complete. Parts of a run (``ds.isel(sample=[0])``) and
    what `lipbound.concat` returns can be saved too. In netCDF, attributes that are lists,
    dictionaries or None stand as JSON; `lipbound.load` reads them back.

    Args:
        ds: a run, with its axes; or other data of `lipbound`.
        path: of the store, which must not exist yet.

    Returns:
        The path.

    Raises:
        StoreError: the path exists or cannot be written, or what is given is no run that could be
            loaded again. It carries the run, so that no work is lost to a full disk.
        LipboundError: its name is that of a file of another kind, such as ``run.csv``.
    """
    if not isinstance(ds, xr.Dataset):
        raise no_run(ds)
    try:
        if "bounds" in ds.attrs and (lacking := schema.lacking_variables(ds)):
            raise StoreError(f"{lacking}; keep the run's axes and variables, or save it by to_zarr")
        path = check_target(errors.file_path(path, "run.zarr"))
        if path.suffix != NETCDF:
            check_run_name(path, "path")
        how: Any = {"dir": path.parent, "prefix": f".{path.name}.", "suffix": PARTIAL}
        with tempfile.TemporaryDirectory(**how) as folder:
            unfinished = Path(folder) / path.name
            if path.suffix == NETCDF:
                _with_attributes(ds, _for_netcdf).to_netcdf(unfinished)
            else:
                _to_zarr(ds, unfinished)
            unfinished.rename(path)
    except OSError as error:
        failure = StoreError(f"{path} could not be written: {one_line(error)}")
        failure.dataset = ds
        raise failure from error
    except StoreError as error:
        error.dataset = ds
        raise
    return path


def _to_zarr(ds: xr.Dataset, path: Path) -> None:
    ds = ds.copy()  # with texts that zarr before 3.1 reads: none of fixed length
    for name in [name for name, one in ds.variables.items() if one.dtype.kind == "U"]:
        ds[name] = ds[name].astype(object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other readers may not know what is consolidated
        ds.to_zarr(path, consolidated=schema.STEP in ds.dims)


def _with_attributes(ds: xr.Dataset, change: Callable[[Any], Any]) -> xr.Dataset:
    """Copy a Dataset with the values of all attributes, also of its variables, changed."""
    ds = ds.copy()
    holders: list[Any] = [ds, *ds.variables.values()]
    for one in holders:
        one.attrs = {name: change(value) for name, value in one.attrs.items()}
    return ds


def _for_netcdf(value: Any) -> Any:
    """Write a value that netCDF cannot hold as JSON, marked by a word before it."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return value if plain else JSON + json.dumps(value)


def _from_netcdf(value: Any) -> Any:
    """Undo `_for_netcdf`, and the types of numbers that netCDF gives."""
    if isinstance(value, str) and value.startswith(JSON):
        return json.loads(value.removeprefix(JSON))
    return value.item() if isinstance(value, np.generic) else value


def load(path: str | Path, *, damaged: str = "warn") -> xr.Dataset:
    """Read a run into memory, as `lipbound.compare` returned it, and check it by its checksums.

    Args:
        path: of the store, or of a netCDF file that `lipbound.save` wrote.
        damaged: what to do with numbers or settings that are not those that were computed: "warn"
            (a `DamagedRunWarning`), "refuse", or "accept".

    Returns:
        The run; or a diff of two runs; or the data of a figure that a script of figures/ stored, or
        of a study such as `lipbound.cache_bits`.

    Raises:
        StoreError: there is no run at ``path``, or an unfinished one.
        AlteredRunError: a part of it is missing or cannot be read, or, with "refuse", is not as it
            was computed.
    """
    if not isinstance(path, str | PathLike):
        raise StoreError(f"path is {shown(path)}; give the path of a stored run")
    path = Path(path).expanduser()
    errors.choice("damaged", damaged, ("warn", "refuse", "accept"))
    _check_there(path)
    ds = read(path)
    of_two = schema.is_diff(ds)
    of_one = "exact" in ds and "figure" not in ds.attrs
    if not (of_two or of_one or "bounds" in ds.attrs):
        if damaged == "refuse":
            raise StoreError(f"{path} holds other data of lipbound, not a run of lipbound.compare")
        return ds
    if not of_two and (lacking := schema.lacking_settings(ds) or schema.lacking_variables(ds)):
        raise _unread(path, "is damaged or was edited", lacking)
    if damaged != "accept" and (found := (diff_faults if of_two else faults)(ds)):
        verify = f"`lipbound verify {shlex.quote(str(path))}` tells what differs; " * (not of_two)
        what = f"{path} is damaged or was edited: {' and '.join(found)}; {verify}compute it again"
        if damaged == "refuse":
            raise AlteredRunError(what)
        errors.warn(what, errors.DamagedRunWarning)
    if of_two:
        return ds
    names = ["exact", "exact_upper", "exact_l2", *ds.attrs["bounds"], *ds.data_vars]
    return ds[[name for name in dict.fromkeys(names) if name in ds]]  # a store sorts them


def _check_there(path: Path) -> None:
    """Refuse a path where no finished run is."""
    finished = path.with_name(path.name.removesuffix(PARTIAL)) if path.name else path
    out = shlex.quote(str(finished))
    try:
        unfinished = bool(path.name) and partial_path(finished).exists()
        if path.is_dir():
            next(path.iterdir(), None)
        there = path.exists()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {one_line(error)}") from error
    if unfinished and (path != finished or not there):
        raise StoreError(f"{path} is an unfinished run; run it again with --out {out} --resume")
    if not there:
        raise StoreError(f"there is no run {path}; `lipbound compare MODEL --out {out}` makes one")


def read(path: Path) -> xr.Dataset:
    """Read any Dataset that `save` has written.

    Raises:
        StoreError: there is none.
        AlteredRunError: a part of it cannot be read.
    """
    netcdf = path.is_file()
    # shapes of a run over steps that is still growing are in one file
    how: dict[str, Any] = {} if netcdf else {"engine": "zarr", "consolidated": None}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a variable that zarr cannot read is missed below
            with xr.open_dataset(path, **how) as ds:
                ds.load()
        if "lipbound" not in ds.attrs:
            raise StoreError("it has no settings of one")
    except Exception as error:  # zarr and xarray raise a zoo of types for what they cannot read
        why = one_line(error)
        if (path / "exact").is_dir() or _newer(path):
            raise _unread(path, "is damaged", f"a part of it cannot be read ({why})") from error
        if runs := sorted(one.parent.parent.name for one in path.glob("*/exact/zarr.json")):
            why = f"it is a folder of runs ({', '.join(runs)}); name one of them"
        elif netcdf or isinstance(error, FileNotFoundError):  # of zarr, which names a group ''
            why = "it is a file of another kind" if netcdf else "there is no Zarr store in it"
        raise StoreError(f"{path} is not a run of lipbound: {why}") from error
    ds.attrs = _numbers(ds.attrs)
    return _with_attributes(ds, _from_netcdf) if netcdf else ds


def _numbers(value: Any) -> Any:
    """Read numbers that are not finite, which zarr before 3.1 writes as text."""
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_numbers, value))
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _unread(path: Path, fault: str, what: str) -> StoreError:
    """Return the error of a store of which something is not read: damage, or too old a reader."""
    wrote = _newer(path)
    if not wrote:
        return AlteredRunError(f"{path} {fault}: {what}; compute it again")
    what = f"{path} was written by {wrote}, newer than what is installed here: {what}"
    return StoreError(f"{what}; pip install --upgrade xarray zarr, or compute it again")


def _newer(path: Path) -> str:
    """Return the packages that wrote a store, with their versions, where newer ones than here."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        wrote = json.loads((path / "zarr.json").read_text())["attributes"]["versions"]
        packages = [name for name in ("xarray", "zarr") if name in wrote]
        newer = [k for k in packages if Version(wrote[k]) > Version(version(k))]
        return " and ".join(f"{name} {wrote[name]}" for name in newer)
    return ""


def takes_run(function: Callable[Concatenate[xr.Dataset, P], T]) -> _TakesRun[P, T]:
    """Let a function whose first argument is a run also take its path, and parts of it.

    The axes of such parts may be gone, as after ``ds.isel(layer=0)``.
    """
    function = knows_options(function)

    @wraps(function)
    def taking(ds: Run, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(run_of(ds), *args, **kwargs)

    return cast("_TakesRun[P, T]", taking)


def run_of(given: object) -> xr.Dataset:
    """Read or complete a run: axes sample, layer and, unless it is of whole layers, head.

    Args:
        given: a run, a part of it such as ``ds.isel(layer=0)``, or the path of a stored one. Of a
            run over steps of training, the last step.

    Raises:
        StoreError: there is no run at the path, it is no run, an axis was reduced or is empty.
    """
    if isinstance(given, str | Path):
        given = load(given)
    if not isinstance(given, xr.Dataset):
        raise no_run(given)
    if schema.is_diff(given):
        what = "this is a diff of two runs, and one run is wanted"
        raise StoreError(f"{what}; lipbound.runs.store.both_runs of it has both")
    if what := _lost(given):
        why = "arithmetic on two runs drops what differs, or all attributes"
        raise StoreError(f"it is no run, or no longer one: {what}; give the run itself ({why})")
    ds = at_step(given)
    for axis in schema.AXES:
        if axis not in ds.dims and axis in ds.coords:
            known = dict.fromkeys((*schema.flags(ds), *PLACED))
            notes = [name for name in known if axis in PLACED.get(name, schema.AXES)]
            notes = [name for name in notes if name in ds.coords]
            # only data variables get the axis, not coordinates
            ds = ds.reset_coords(notes).expand_dims(axis).set_coords(notes)
    return ds.transpose(*(axis for axis in schema.AXES if axis in ds.dims), ...)


def diff_of(given: object) -> xr.Dataset:
    """Read or complete a diff of two runs: axes sample, layer and, unless of whole layers, head.

    Args:
        given: a diff, a part of it such as ``ds.isel(layer=0)``, or the path of a stored one.

    Raises:
        StoreError: there is none at the path, it is none, an axis was reduced or is empty.
    """
    return paired(*map(run_of, both_runs(load(given) if isinstance(given, str | Path) else given)))


def at_step(ds: xr.Dataset, step: int | None = None) -> xr.Dataset:
    """Select one step of a run over steps of training; the last that has norms for None.

    Any other run, and a single step, is returned as it is for None.

    Raises:
        StoreError: the step was not measured, or there are no steps.
    """
    if step is None:
        if schema.STEP not in ds.dims:
            return ds
        there = schema.with_exact(ds, schema.STEP).values
        return ds.isel({schema.STEP: max(np.flatnonzero(there), default=-1)})
    if schema.STEP not in ds.coords:
        raise StoreError(f"step is {step}, but the run is not one over steps of training")
    steps = ds[schema.STEP].values.reshape(-1).tolist()
    if step not in steps:
        near = sorted(sorted(steps, key=lambda one: abs(one - step))[:3])
        what = f"{len(steps)} steps, from {steps[0]} to {steps[-1]}, the nearest are"
        raise StoreError(f"step {step} was not measured; of {what} {', '.join(map(str, near))}")
    return ds.sel({schema.STEP: step}) if schema.STEP in ds.dims else ds


def no_run(given: object) -> StoreError:
    """Describe what was given in place of a run."""
    return StoreError(f"a run is wanted, not {shown(given)}; give what lipbound.compare returns")


def _lost(ds: xr.Dataset) -> str:
    """Describe what a Dataset lacks to be shown as a run, or a part of one; empty for nothing."""
    if "exact" not in ds.variables:
        return "'exact' is missing"
    if what := schema.lacking_settings(ds):
        return what
    for axis in schema.AXES if ds.attrs["made"]["heads"] else schema.AXES[:2]:
        if axis not in ds.coords or not ds[axis].size:
            return f"it has no {axis}s any more, as after .mean({axis!r})"
    bounds = [name for name in ds.attrs["bounds"] if name in ds.variables]
    needed = ("exact_converged", "length", *map(schema.sound, bounds))
    return next((f"{name!r} is missing" for name in needed if name not in ds.variables), "")


# -- two runs side by side: a diff keeps all of both, each checked by its own checksums ------------


def paired(a: xr.Dataset, b: xr.Dataset) -> xr.Dataset:
    """Set two runs side by side.

    Args:
        a: a run, with its axes. b: another, on the same samples, layers and heads.

    Returns:
        Dataset with the axes of both: every variable of theirs as ``NAME_a`` and ``NAME_b``;
        ``ratio``, ``exact_b / exact_a``; and, where both have upper ends, ``ratio_lower`` and
        ``ratio_upper``, float64, which enclose the ratio of the norms, rounding of the division
        included. They hold together with a probability of failure that is the sum of both runs'.
        All are NaN where ``exact_a`` is not positive or a norm is missing. ``attrs["diff"]`` has
        the attributes of both, ``attrs["notes"]`` what is told of them.

    Raises:
        StoreError: they are not of the same thing, or not as they were computed.
    """
    notes = check_alike(a, b)
    parts = [
        run.rename({name: f"{name}_{side}" for name in run.variables if name not in _SHARED})
        for side, run in (("a", a), ("b", b))
    ]
    ds = xr.merge(parts, join="exact", compat="equals", combine_attrs="override")
    attrs = {schema.DIFF: {"a": dict(a.attrs), "b": dict(b.attrs)}, "notes": notes}
    ds = ds.assign(_ratios(a, b)).drop_attrs(deep=False)
    return ds.assign_attrs(attrs | {"lipbound": b.attrs["lipbound"]})


def _ratios(a: xr.Dataset, b: xr.Dataset) -> dict[str, xr.DataArray]:
    """Variables `RATIOS` of two runs."""
    of_a, of_b = (run["exact"].reset_coords(drop=True) for run in (a, b))
    known = np.isfinite(of_a) & (of_a > 0) & of_b.notnull()
    found: dict[str, Any] = {"ratio": of_b / of_a}
    if "exact_upper" in a and "exact_upper" in b:
        found["ratio_lower"] = np.nextafter(of_b / a["exact_upper"].reset_coords(drop=True), 0.0)
        found["ratio_upper"] = np.nextafter(b["exact_upper"].reset_coords(drop=True) / of_a, np.inf)
    for name, value in found.items():
        found[name] = value.where(known).drop_attrs()
        found[name].attrs = {"label": name.replace("_", ", "), "long_name": RATIOS[name]}
    return found


def both_runs(ds: Any) -> tuple[xr.Dataset, xr.Dataset]:
    """Take apart what `paired` put side by side, or a part of it: the runs a and b.

    Raises:
        StoreError: it is no diff.
    """
    if not isinstance(ds, xr.Dataset) or not schema.is_diff(ds):
        raise StoreError(f"a diff of two runs is wanted, not {shown(ds)}; lipbound.diff makes one")
    runs = []
    for side in schema.SIDES:
        names = {name: name[:-2] for name in map(str, ds.variables) if name.endswith(f"_{side}")}
        others = [name for name in ds.variables if name not in (*names, *_SHARED)]
        run = ds.drop_vars(others).rename(names)
        run.attrs = dict(ds.attrs[schema.DIFF][side])
        runs.append(run.set_coords(schema.flags(run)))
    return runs[0], runs[1]


def diff_faults(ds: xr.Dataset) -> list[str]:
    """Describe what of a diff is no longer as it was computed.

    Raises:
        AlteredRunError: settings or variables of one of its runs are missing.
    """
    try:
        runs = both_runs(ds)
        lacking = [schema.lacking_settings(run) or schema.lacking_variables(run) for run in runs]
    except (KeyError, ValueError, TypeError) as error:
        raise AlteredRunError(f"it is no diff of two runs any more: {error}") from error
    if any(lacking):
        raise AlteredRunError(f"of one of its two runs, {' and '.join(filter(None, lacking))}")
    found = []
    for side, run in zip(schema.SIDES, runs, strict=True):
        found += [f"of {side}, {what}" for what in faults(run)]
    for name, ratio in _ratios(*runs).items():
        if name not in ds or not np.array_equal(ratio, ds[name], equal_nan=True):
            found.append(f"{name} is not that of its two runs")
    return found


def check_alike(a: xr.Dataset, b: xr.Dataset) -> list[str]:
    """Refuse two runs whose numbers are not of the same thing.

    Returns:
        What else differs, in sentences.

    Raises:
        StoreError: they are of other maps, norms, inputs, layers or heads, or not as they were
            computed.
    """
    for side, run in zip(schema.SIDES, (a, b), strict=True):
        check_whole(run, f"{side} ({run.attrs['model']})")
    refuse_inputs(sample_identities(a) == sample_identities(b), a.attrs["data"], b.attrs["data"])
    refuse_unlike(*({name: run.attrs[name] for name in schema.ALIKE} for run in (a, b)))
    names = [k for k in (*_SHARED[1:], "kind", "stream") if k in {*a.coords, *b.coords}]
    layouts = [{n: run[n].values.tolist() for n in names if n in run.coords} for run in (a, b)]
    refuse_unlike(*layouts)
    of_a, of_b = ({name: run.attrs.get(name) for name in schema.TOLD} for run in (a, b))
    notes = unlike(of_a, of_b, "{} is {!r} in a and {!r} in b")
    if GIVEN in (a.attrs["architecture"], b.attrs["architecture"]):
        notes.append("layers were given with inputs of their own, which are not compared")
    counts = [int(schema.with_exact(run).sum()) for run in (a, b)]
    if counts[0] != counts[1]:
        notes.append(f"exact norms are of {counts[0]} samples in a and {counts[1]} in b")
    return notes


def unlike(a: Mapping[str, Any], b: Mapping[str, Any], words: str) -> list[str]:
    """Say of each setting that is not alike in two runs, in some words, its name and its values."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return [words.format(name, a.get(name), b.get(name)) for name in names]


def refuse_unlike(of_a: Mapping[str, Any], of_b: Mapping[str, Any]) -> None:
    """Refuse two runs, or what they are measured with, that have not all of this alike."""
    if found := unlike(of_a, of_b, "{} is {!r:.80} in a and {!r:.80} in b"):
        instead = "measure both alike, select what both have, or take map='layer'"
        raise StoreError(f"a and b cannot be compared: {found[0]}; {instead}")


def refuse_inputs(alike: bool, of_a: str, of_b: str) -> None:
    """Refuse inputs that are not alike, of data that are described so."""
    if not alike:
        both = repr(of_a) if of_a == of_b else f"{of_a!r} in a and {of_b!r} in b"
        what = f"data is {both}, other samples, or other tokens or pixels"
        raise StoreError(f"a and b cannot be compared: {what}; measure both on the same")


def sample_identities(run: xr.Dataset) -> list[tuple[str, int]]:
    """Identities of the samples of a run: the fingerprint of the data, and the number there."""
    if schema.RUN not in run.variables:
        return [(run.attrs["data_fingerprint"], int(sample)) for sample in run["sample"].values]
    prints = [one["data_fingerprint"] for one in run.attrs["runs"]]
    of = run[schema.RUN].transpose("sample", "layer").values[:, 0]
    return [(prints[k], int(s)) for k, s in zip(of, run[schema.RUN_SAMPLE].values, strict=True)]


# -- unfinished runs: folders filled block by block, that another process can take up --------------


class LayerResult(NamedTuple):
    """One layer at one block of samples.

    Attributes:
        start: number of the first sample.
        layer: its position among the chosen layers.
        values: by name, (samples, heads) each.
        lengths: (samples,) tokens of the inputs.
        error: of the capture.
        name: of the layer; not stored.
    """

    start: int
    layer: int
    values: dict[str, np.ndarray]
    lengths: np.ndarray
    error: float
    name: str = ""


def partial_path(path: Path) -> Path:
    """Name the folder of the unfinished run that will become ``path``."""
    return path.with_name(path.name + PARTIAL)


def hold(path: Path, file: Path, *, again: bool = False) -> BaseFileLock:
    """Take the lock of a run, which the system lets go when its process ends.

    Args:
        path: of the run, for messages.
        file: that is locked.
        again: whether this process may take it although it holds it already.

    Raises:
        StoreError: another process holds it; the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file, is_singleton=again, thread_local=False)
        lock.acquire(timeout=0)
    except Timeout as error:
        what = f"another process is filling {path} at this moment; wait, or choose another name"
        raise StoreError(what) from error
    except OSError as error:
        raise StoreError(f"{file.parent} cannot be written: {one_line(error)}") from error
    return lock


def check_free(path: Path, *, resume: bool) -> int | None:
    """Check that a run can be begun, or taken up where ``resume`` is asked for.

    Returns:
        How many samples the unfinished run takes at a time; None where there is none.

    Raises:
        StoreError: it is there, whole or in part, another process fills it, or it cannot be
            written.
    """
    check_target(path)
    if partial_path(path).exists():
        hold(path, partial_path(path) / LOCK).release()
        if not resume:
            what = f"{partial_path(path)} holds an unfinished run"
            raise StoreError(f"{what}; continue it with resume (--resume), or remove it first")
    return configuration(partial_path(path)).get("block")


class PartialRun:
    """Folder of an unfinished run, held by one process at a time.

    Each layer at a block of samples is a file, which is there whole or not at all: a process may be
    killed at any moment. It begins with a mark, a hash over what follows and the configuration; a
    file that does not fit its mark when the run is taken up counts as not measured.

    Args:
        path: where the finished run will be.
        config: everything that decides its numbers, in JSON's types.

    Attributes:
        found: what was there already.

    Raises:
        StoreError: another process fills it; it belongs to another configuration; it cannot be
            written.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self._path, self._salt = partial_path(path), json.dumps(config, sort_keys=True)
        self._lock = hold(path, self._path / LOCK)
        try:
            self.found = self._take_up(config)
        except BaseException:
            self._lock.release()
            raise

    def _take_up(self, config: dict[str, Any]) -> list[LayerResult]:
        """Read the files that fit their marks; those that do not are told."""
        if stored := configuration(self._path):
            same_configuration(self._path, stored, config)
        files = sorted(self._path.glob("[!.]*.npz"))
        found = [one for one in map(self._read, files) if one is not None]
        if files and not stored and not found:
            what = f"the description of {self._path} is lost"
            raise StoreError(f"{what}, and nothing in it fits this run; choose another name")
        if lost := len(files) - len(found):
            tell(f"damaged blocks in {self._path} are measured again: {lost} of {len(files)}")
        self._put(CONFIGURATION, self._salt.encode())
        return found

    def _read(self, file: Path) -> LayerResult | None:
        """Read a layer at a block; None where it is not as it was written."""
        content = b""
        with suppress(OSError):  # what cannot be read is measured again
            content = file.read_bytes()
        if not content.startswith(self._mark(content[MARK:])):
            return None
        with np.load(io.BytesIO(content[MARK:])) as stored:
            parts = dict(stored)
        start, layer, error = (parts.pop(name).item() for name in (START, LAYER, ERROR))
        lengths = parts.pop(LENGTHS)
        return LayerResult(start, layer, parts, lengths, error)

    def _mark(self, content: bytes) -> bytes:
        """Hash over what is stored of a layer at a block, and over what run that is of."""
        return hashlib.sha256(self._salt.encode() + content).digest()

    def write(self, measured: LayerResult) -> None:
        """Store one layer at a block.

        Args:
            measured: the layer.

        Raises:
            StoreError: it cannot be written.
        """
        parts: dict[str, Any] = {START: measured.start, LAYER: measured.layer}
        parts |= measured.values | {LENGTHS: measured.lengths, ERROR: measured.error}
        written = io.BytesIO()
        np.savez(written, **parts)
        content = written.getvalue()
        self._put(f"{measured.start}-{measured.layer}.npz", self._mark(content) + content)

    def _put(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        try:
            with replacing(self._path / name) as (unfinished,):
                unfinished.write_bytes(content)
        except StoreError as error:
            raise StoreError(f"{error}; run again with resume once it can") from error

    def keeping(self, results: Iterable[LayerResult]) -> Iterator[LayerResult]:
        """Store results as they come.

        Yields:
            What was there already, then the results.
        """
        yield from self.found
        for measured in results:
            self.write(measured)
            yield measured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Let go of the folder, and remove it where the run is finished and saved."""
        self._lock.release()
        if failure is None:
            shutil.rmtree(self._path, ignore_errors=True)


def configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration of an unfinished run; empty where it is lost."""
    try:
        stored = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def same_configuration(path: Path, stored: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse a run that differs from what is asked for, naming the settings that do."""
    if different := unlike(stored, asked, "{} was {} and is now {}"):
        what = f"{path} belongs to another configuration: {'; '.join(different)}"
        raise StoreError(f"{what}; use the same arguments, or another name")
