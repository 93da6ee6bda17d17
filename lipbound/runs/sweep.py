"""Many runs from one file: every combination of models, data and lengths, one store each, and an index of them."""

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lipbound.errors import LipboundError, nearest
from lipbound.runs.compare import run
from lipbound.runs.config import RunConfig, check_folder_name

AXES = ("model", "data", "max_length")
OPTIONS = tuple(field.name for field in fields(RunConfig) if field.name not in (*AXES, "out", "resume"))
"""What else a sweep file may say; a sweep itself decides where its runs are saved, and resumes them."""
FIELDS = ("run", *AXES, "status", "error")


@dataclass(frozen=True)
class Run:
    """One run of a sweep: the name of its store, and the arguments of `lipbound.compare`."""

    name: str
    arguments: dict[str, Any]


def planned_runs(path: str | Path) -> list[Run]:
    """The runs that a sweep file asks for.

    The file is YAML: ``model``, ``data`` and ``max_length`` are values or lists of them, every combination of which is a run; all other keys
    (`OPTIONS`) are arguments of `lipbound.compare` that hold for every run.

    Raises:
        LipboundError: the file cannot be read, is not such a mapping, or has a key that is not known.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LipboundError(f"{path} cannot be read as YAML: {_why(error)}") from error
    if not isinstance(content, dict) or not content.get("model"):
        raise LipboundError(f"{path} is not a sweep; give a mapping with at least a model, such as 'model: [builtin:minilm, builtin:gpt2]'")
    for key in content:
        if key not in (*AXES, *OPTIONS):
            raise LipboundError(f"{path} has an unknown key {key!r}; {nearest(str(key), (*AXES, *OPTIONS))}")
    common = {key: value for key, value in content.items() if key in OPTIONS}
    lists = [_listed(content.get("model")), _listed(content.get("data")), _listed(content.get("max_length", RunConfig.max_length))]
    runs: dict[str, Run] = {}
    for values in itertools.product(*lists):
        chosen = dict(zip(AXES, values, strict=True))
        name = base = _name(*values)
        for number in itertools.count(2):
            if name not in runs:
                break
            name = f"{base}-{number}"
        runs[name] = Run(name, chosen | common)
    return list(runs.values())


def sweep(path: str | Path, out: str | Path, *, client: Any = None, progress: bool = True) -> Iterator[dict[str, Any]]:
    """Do the runs of a sweep file one after the other, each into ``<out>/<name>.zarr``; ``<out>/index.csv`` says how each ended.

    Finished runs are kept, unfinished ones taken up. A run that fails is reported and does not stop the others.

    Args:
        path: see `planned_runs`.
        out: a folder, made if need be.
        client, progress: as in `lipbound.compare`.

    Yields:
        For every run, as it ends, its row of the index: run, model, data, max_length, status ("done", "kept" where it was finished before, or
        "failed") and error.
    """
    check_folder_name("out", out, "holds all runs of the sweep and their index.csv")
    planned = planned_runs(path)
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LipboundError(f"{folder} cannot be written: {error.strerror or error}") from error
    rows: list[dict[str, Any]] = []
    for one in planned:
        row = {"run": f"{one.name}.zarr", **{key: one.arguments.get(key) for key in AXES}, "status": "done", "error": ""}
        try:
            config = RunConfig(**one.arguments, out=folder / f"{one.name}.zarr", resume=True)
            kept = (folder / f"{one.name}.zarr").exists()
            run(config, client=client, progress=progress)
            row |= {"status": "kept" if kept else "done"}
        except LipboundError as error:
            row |= {"status": "failed", "error": str(error)}
        except Exception as error:  # whatever it is, the other runs must go on
            row |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        _index(folder / "index.csv", rows)
        yield row


def _why(error: Exception) -> str:
    """What is wrong with a file, and in which line."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    mark = getattr(error, "problem_mark", None)
    what = str(getattr(error, "problem", None) or error).splitlines()[0]
    return what if mark is None else f"line {mark.line + 1}, {what}"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name(model: Any, data: Any, length: Any) -> str:
    parts = [str(model), "default" if data is None else Path(str(data)).stem, str(length)]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.") for part in parts)


def _index(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the index, whole or not at all."""
    new = path.with_suffix(".csv.partial")
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)
