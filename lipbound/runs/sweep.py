"""Many runs from one file: every combination of models, data and lengths, and an index of them."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
import yaml

from lipbound.bounds.audit import audit
from lipbound.errors import LipboundError, nearest, one_line, shown
from lipbound.formatting import replacing
from lipbound.runs.compare import run
from lipbound.runs.config import IN_PYTHON, RunConfig, check_folder_name
from lipbound.schema import Contents, compared_with

_AXES = ("model", "data", "max_length")
_OWN = (*_AXES, *IN_PYTHON, "out", "resume")
OPTIONS = tuple(field.name for field in fields(RunConfig) if field.name not in _OWN)
"""Other keys of a sweep file; a sweep itself decides where runs are saved, and resumes them."""
LISTS = ("layers", "bounds", "extras")
"""Options whose single values may be lists; a list of lists are several of them."""
_NUMBERS = ("samples", "layers", "norms", "not_closed", "exact_geomean", "exact_min", "exact_max")
"""Columns of the index about exact norms; `<name>_ratio` and `<name>_violations` follow."""


def planned_runs(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the runs that a sweep file asks for: arguments of `lipbound.compare` by their names.

    The file is YAML: ``model``, ``data``, ``max_length`` and all other keys (`OPTIONS`), which are
    arguments of `lipbound.compare`, are values or lists of them, every combination of which is a
    run. Where not every combination is wanted, ``pairs`` is a list of mappings of the same keys,
    one for each model with its data; what a pair does not say, or says otherwise, is as it stands
    beside. Options that are not the same in all runs are part of their names.

    Raises:
        LipboundError: the file cannot be read, is not such a mapping, or has a key that is not
            known.
    """
    if not isinstance(path, str | PathLike):
        raise LipboundError(f"path is {shown(path)}; give the name of a YAML file")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LipboundError(f"{path} cannot be read as YAML: {_why(error)}") from error
    if not isinstance(content, dict):
        raise LipboundError(f"{path} is not a sweep; give a mapping with at least a model")
    pairs = content.pop("pairs", [{}])
    if not isinstance(pairs, list) or not pairs or not all(isinstance(one, dict) for one in pairs):
        raise LipboundError(f"{path} has pairs that are no list of mappings, as - data: words.txt")
    every: list[dict[str, Any]] = []
    for pair in pairs:
        merged = content | pair
        if unknown := [key for key in merged if key not in (*_AXES, *OPTIONS)]:
            near = nearest(str(unknown[0]), (*_AXES, *OPTIONS, "pairs"))
            raise LipboundError(f"{path} has an unknown key {unknown[0]!r}; {near}")
        if not merged.get("model"):
            raise LipboundError(f"{path} has no model for {pair or 'its runs'}; give one at least")
        merged = {k: getattr(RunConfig, k) for k in (*_AXES, *OPTIONS) if k not in merged} | merged
        if empty := [key for key, value in merged.items() if not _values(key, value)]:
            raise LipboundError(f"{path} has an empty list of {empty[0]}; give a value at least")
        several = itertools.product(*(_values(key, value) for key, value in merged.items()))
        every += [dict(zip(merged, one, strict=True)) for one in several]
    runs: dict[str, dict[str, Any]] = {}
    for arguments in every:
        base = name = _name(arguments, _varying(every))
        count = itertools.count(2)
        while name in runs:
            name = f"{base}-{next(count)}"
        runs[name] = arguments
    return runs


def _values(key: str, value: Any) -> list[Any]:
    """Values of a key of a sweep: those of a list, or one."""
    one = not isinstance(value, list) or (key in LISTS and list not in map(type, value))
    return [value] if one else value


def _varying(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options that are not the same in all runs."""
    return [key for key in OPTIONS if any(one[key] != every[0][key] for one in every)]


def sweep(
    path: str | Path, out: str | Path, *, client: Any = None, progress: bool = True
) -> list[dict[str, Any]]:
    """Do the runs of a sweep file, each into ``<out>/<name>.zarr``, with an index in ``index.csv``.

    Finished runs are kept, unfinished ones taken up. A run that fails does not stop the others.

    Args:
        path: see `planned_runs`.
        out: a folder, made if need be.
        client: as in `lipbound.compare`.
        progress: as in `lipbound.compare`.

    Returns:
        The rows of the index: run, model, data, max_length, options that are not the same in all
        runs (``asked_samples`` and ``asked_layers`` beside what there was), status ("done", "kept"
        where it was finished before, or "failed"), error, and the numbers of `index_numbers`.

    Raises:
        LipboundError: the file cannot be read, or the folder cannot be written.
    """
    return list(rows(path, out, client=client, progress=progress))


def rows(path: str | Path, out: str | Path, **how: Any) -> Iterator[dict[str, Any]]:
    """Do the runs of a sweep file as `sweep` does, with its arguments.

    Yields:
        The row of every run as it ends.
    """
    check_folder_name("out", out, "holds all runs of the sweep and their index.csv")
    planned = planned_runs(path)
    varying = _varying(list(planned.values()))
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LipboundError(f"{folder} cannot be written: {one_line(error)}") from error
    ended: list[dict[str, Any]] = []
    for name, arguments in planned.items():
        store = folder / f"{name}.zarr"
        row = {"run": store.name, **{key: arguments[key] for key in _AXES}}
        row |= {f"asked_{key}" if key in _NUMBERS else key: arguments[key] for key in varying}
        row |= {"status": "failed", "error": ""} | dict.fromkeys(_NUMBERS)
        try:
            config = RunConfig(**arguments, **how, out=store, resume=True)
            status = "kept" if store.exists() else "done"
            row |= index_numbers(run(config)) | {"status": status}
        except Exception as error:  # whatever it is, the other runs must go on
            kind = "" if isinstance(error, LipboundError) else f"{type(error).__name__}: "
            row["error"] = f"{kind}{error}"
        ended.append(row)
        with replacing(folder / "index.csv") as (index,):  # it has the bounds of all of its runs
            pd.DataFrame(ended, dtype=object).to_csv(index, index=False)
        yield row


def index_numbers(ds: xr.Dataset) -> dict[str, float]:
    """Numbers of a run for its row of the index.

    Returns:
        ``samples`` and ``layers``; ``norms``, exact norms, of which ``not_closed`` were not found
        to the tolerance; their geometric mean over samples, layers and heads (those that are not
        zero), smallest and largest. Of every bound the geometric mean of bound / exact,
        ``<name>_ratio``, and how often it is below the exact norm, ``<name>_violations``.
    """
    exact, found = ds["exact"], Contents.of(ds)
    row = {
        "samples": found.samples,
        "layers": len(found.layers),
        "norms": found.norms,
        "not_closed": found.norms - found.closed,
        "exact_geomean": _geomean(exact.where(exact > 0)),
        "exact_min": float(exact.min()),
        "exact_max": float(exact.max()),
    }
    for name, entry in audit(ds).items():
        norm = ds[compared_with(ds, name)]
        row[f"{name}_ratio"] = _geomean(ds[name] / norm.where(np.isfinite(norm) & (norm > 0)))
        row[f"{name}_violations"] = entry["violations"]
    return row


def _geomean(values: xr.DataArray) -> float:
    """Geometric mean of what is there; NaN where there is nothing."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(values).mean()))


def _why(error: Exception) -> str:
    """Say why a file cannot be read, and in which line of YAML."""
    what = str(getattr(error, "problem", None) or one_line(error))
    mark = getattr(error, "problem_mark", None)
    return what if mark is None else f"line {mark.line + 1}, {what}"


def _name(arguments: Mapping[str, Any], varying: Iterable[str]) -> str:
    """Name the store of a run, with few enough characters for a file: data may be a long text."""
    model, data, length = (arguments[key] for key in _AXES)
    stem = "default" if data is None else Path(str(data)).stem
    parts = [str(model)[-80:], stem[:60], str(length)]
    parts += [f"{key}_{arguments[key]}"[:60] for key in varying]
    parts = [re.sub(r"(?<![A-Za-z0-9])-(?=\d)", "minus", part) for part in parts]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.") for part in parts)[:200]
