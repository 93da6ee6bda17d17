"""Runs whose files were damaged or edited: told before a number is shown, and no bound is accused
of what is not there."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from support.runs import TEXTS

import lipbound as lb
from lipbound import tables
from lipbound.bounds.audit import audit, missing
from lipbound.cli import main
from lipbound.errors import AlteredRunError, DamagedRunWarning, StoreError
from lipbound.runs import store
from lipbound.runs.checksums import damage


@pytest.fixture(scope="module")
def sound(whole: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `support.runs`; copy it to damage it."""
    return store.save(whole, tmp_path_factory.mktemp("sound") / "run.zarr")


def chunk(run: Path, name: str) -> Path:
    """The first file with values of a variable."""
    return next(file for file in sorted((run / name / "c").rglob("*")) if file.is_file())


def without_chunk(name: str) -> Callable[[Path], None]:
    return lambda run: chunk(run, name).unlink()


def without_variable(name: str) -> Callable[[Path], None]:
    return lambda run: shutil.rmtree(run / name)


def cut(size: int) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = chunk(run, "yudin")
        file.write_bytes(file.read_bytes()[:size])

    return change


def edited(name: str, at: object, to: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        array = zarr.open_group(run, mode="a")[name]
        assert isinstance(array, zarr.Array)
        array[at] = to

    return change


def emptied(name: str) -> Callable[[Path], None]:
    return lambda run: chunk(run, name).write_bytes(b"") and None


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        first, second = chunk(run, one), chunk(run, other)
        values = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(values)

    return change


def setting(name: str, to: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = run / "zarr.json"
        known = json.loads(file.read_text())
        if to is None:
            del known["attributes"][name]
        else:
            known["attributes"][name] = to
        file.write_text(json.dumps(known))

    return change


def saying(name: str, word: str, to: object) -> Callable[[Path], None]:
    """Edit what a variable says about itself."""

    def change(run: Path) -> None:
        file = run / name / "zarr.json"
        known = json.loads(file.read_text())
        known["attributes"][word] = to
        file.write_text(json.dumps(known))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda run: (run / name / "zarr.json").write_text(content) and None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a chunk of a bound": (
        without_chunk("yudin"),
        "its numbers at every sample and layer are not those that were computed",
    ),
    "a chunk of exact norms": (without_chunk("exact"), "are not those that were computed"),
    "a chunk of upper ends": (without_chunk("exact_upper"), "are not those that were computed"),
    "a chunk of flags": (without_chunk("yudin_sound"), "are not those that were computed"),
    "the checksums": (without_chunk("checksum"), "its numbers at every sample and layer"),
    "all checksums": (without_variable("checksum"), "the checksums of its numbers are missing"),
    "the layers": (without_chunk("layer"), "are not those that were computed"),
    "the samples": (without_chunk("sample"), "are not those that were computed"),
    "the heads": (without_chunk("head"), "its numbers at every sample and layer"),
    "names of layers": (
        without_chunk("layer_name"),
        "its numbers at every sample and layer",
    ),
    "the lengths": (without_chunk("length"), "its numbers at every sample and layer"),
    "other lengths": (
        edited("length", 1, 99),
        "its numbers at sample 1 layer 0, sample 1 layer 1 are not those",
    ),
    "an empty coordinate": (emptied("layer"), "a part of it cannot be read"),
    "files that changed places": (
        swapped("exact_upper", "yudin"),
        "its numbers at every sample and layer",
    ),
    "an edited value": (
        edited("lipbound", (1, 0, 2), 1e-3),
        "its numbers at sample 1 layer 0 are not those that were computed;",
    ),
    "an edited setting": (
        setting("tol", 0.1),
        "its settings (attributes) are not those that were recorded",
    ),
    "an edited citation": (
        saying("yudin", "citation", "kim2021"),
        "what 'yudin' says (its attributes) is not what it said;",
    ),
    "an edited label": (saying("lipbound", "label", "Kim"), "what 'lipbound' says (its attr"),
    "an edited name of exact norms": (
        saying("exact", "long_name", "upper end"),
        "what 'exact' says (its attributes) is not what it said;",
    ),
    "a missing setting": (setting("samples", None), "its setting 'samples' is missing"),
    "a setting of another type": (setting("tol", "wide"), "its setting 'tol' is 'wide'"),
    "another dtype": (setting("dtype", "float8"), "its setting 'dtype' is 'float8'"),
    "a bound that is not there": (
        setting("bounds", ["yudin", "lipbound", "kim"]),
        "'kim' is missing",
    ),
    "a bound": (without_variable("yudin"), "'yudin' is missing"),
    "exact norms": (without_variable("exact"), "'exact' is missing"),
    "flags": (without_variable("lipbound_sound"), "'lipbound_sound' is missing"),
    "a file cut short": (cut(9), "a part of it cannot be read"),
    "an empty file": (cut(0), "a part of it cannot be read"),
    "a description cut short": (text("yudin", "{"), "a part of it cannot be read"),
    "a description of something else": (
        text("yudin", "[]"),
        "a part of it cannot be read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_run_is_refused_in_one_sentence(
    kind: str,
    sound: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, sentence = DAMAGE[kind]
    run = Path(shutil.copytree(sound, tmp_path / "run.zarr"))
    change(run)
    monkeypatch.setattr("sys.argv", ["lipbound", "table", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert sentence in err
    assert "compute it again" in err
    if "are not those" in sentence:
        with pytest.warns(DamagedRunWarning, match="damaged or was edited"):
            ds = lb.load(run)
        assert not any(
            entry["violations"]
            for name, entry in audit(ds).items()
            if name != "lipbound" or kind != "an edited value"
        )


@pytest.mark.parametrize(
    "command",
    [["heatmap", "-o", "x.pdf"], ["cite"], ["report", "-o", "x.html"]],
    ids=lambda c: c[0],
)
def test_every_command_refuses_it(
    command: list[str],
    sound: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Path(shutil.copytree(sound, tmp_path / "run.zarr"))
    edited("lipbound", (1, 0, 2), 1e-3)(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lipbound", command[0], str(run), *command[1:]])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "its numbers at sample 1 layer 0 are not those" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.zarr"]


def test_what_is_as_it_was_is_read_without_a_word(sound: Path, whole: xr.Dataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamagedRunWarning)
        ds = lb.load(sound)
        assert ds["exact"].identical(whole["exact"])
        assert store.load(sound, damaged="refuse").identical(ds)
    with pytest.raises(lb.LipboundError, match="did you mean 'refuse'"):
        store.load(sound, damaged="refused")


def test_words_of_variables_stay_with_runs_and_parts_of_them(
    whole: xr.Dataset, tmp_path: Path
) -> None:
    parts = [whole.isel(sample=[0]), whole.isel(sample=[1])]
    for number, ds in enumerate(
        [whole.isel(layer=[1]), lb.concat(parts), lb.diff(whole, whole), whole]
    ):
        for name in (f"{number}.zarr", f"{number}.nc"):
            assert lb.load(lb.save(ds, tmp_path / name), damaged="refuse").sizes == ds.sizes
    noted = whole.copy()
    noted["yudin"].attrs["units"] = "1"  # whoever adds something changes nothing
    assert damage(noted) == ""
    noted["yudin"].attrs["citation"] = "kim2021"
    sentence = r"what 'yudin' says \(its attributes\) is not what it said"
    for use in (
        lambda: lb.concat([noted.isel(sample=[0]), parts[1]]),
        lambda: lb.diff(noted, whole),
        lambda: lb.load(
            lb.save(lb.diff(whole, whole).assign(yudin_a=noted["yudin"]), tmp_path / "d.zarr"),
            damaged="refuse",
        ),
    ):
        with pytest.raises(StoreError, match=sentence):
            use()
    found = lb.verify(noted, places=1, data=TEXTS)
    assert [said for said in found.problems if re.match(sentence, said)]


def test_a_finished_run_is_not_taken_up_when_it_is_damaged(bert: Path, tmp_path: Path) -> None:
    options = {
        "max_length": 12,
        "progress": False,
        "bounds": ["yudin"],
        "out": tmp_path / "run.zarr",
        "resume": True,
        "delta": None,
    }
    lb.compare(bert, TEXTS[:1], **options)
    without_chunk("yudin")(tmp_path / "run.zarr")
    with pytest.raises(
        AlteredRunError, match="its numbers at every sample and layer are not those"
    ):
        lb.compare(bert, TEXTS[:1], **options)


def test_what_is_not_there_is_not_compared(gpt2_run: xr.Dataset) -> None:
    ds = gpt2_run.copy(deep=True)
    ds["yudin"][0] = np.nan
    ds["exact"][1, 0] = np.nan
    ds["castin"][...] = np.nan
    found = audit(ds)
    assert (found["yudin"]["violations"], found["yudin"]["compared"], found["yudin"]["broken"]) == (
        0,
        4,
        0,
    )
    assert (
        found["castin"]["violations"],
        found["castin"]["compared"],
        found["castin"]["worst"],
    ) == (0, 0, pytest.approx(np.nan, nan_ok=True))
    assert (missing(ds, "yudin"), missing(ds, "exact"), missing(ds, "lipbound")) == (8, 4, 0)
    ds["lipbound"][0, 1, 0] = 0.5 * ds["exact"][0, 1, 0]
    assert audit(ds)["lipbound"]["broken"] == 1  # what is there is
    for format in tables.FORMATS:
        tables.render(ds, format)
    text = tables.render(ds)
    assert "Yudin 2025, Thm 3 (yudin): no value at 8 of 12" in " ".join(text.split())
    assert "exact norms: no value at 4 of 16" in " ".join(text.split())


def test_figures_are_no_runs(tmp_path: Path) -> None:
    ds = xr.Dataset({"norm": ("length", [1.0])}, attrs={"lipbound": "0.1.0", "figure": "castin-1"})
    path = store.save(ds, tmp_path / "castin-1.zarr")
    assert lb.load(path).identical(ds)
    with pytest.raises(StoreError, match="holds the data of the figure 'castin-1', not a run"):
        store.load(path, damaged="refuse")
