"""Runs whose files were damaged or edited: told before a number is shown, and no bound is accused
of what is not there."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from support.commands import command, refused
from support.runs import OPTIONS, TEXTS

import lipbound as lb
from lipbound.bounds.audit import audit, missing
from lipbound.errors import AlteredRunError, DamagedRunWarning, StoreError
from lipbound.runs.checksums import faults


@pytest.fixture(scope="module")
def sound(whole, tmp_path_factory):
    """The run of `support.runs`; copy it to damage it."""
    return lb.save(whole, tmp_path_factory.mktemp("sound") / "run.zarr")


def chunk(run, name):
    """The first file with values of a variable."""
    return next(file for file in sorted((run / name / "c").rglob("*")) if file.is_file())


def without_chunk(name):
    return lambda run: chunk(run, name).unlink()


def without_variable(name):
    return lambda run: shutil.rmtree(run / name)


def cut(name, size):
    return lambda run: chunk(run, name).write_bytes(chunk(run, name).read_bytes()[:size]) and None


def edited(name, at, to):
    return lambda run: zarr.open_group(run, mode="a")[name].__setitem__(at, to)


def swapped(one, other):
    def change(run):
        first, second = chunk(run, one), chunk(run, other)
        values = first.read_bytes(), second.read_bytes()
        first.write_bytes(values[1])
        second.write_bytes(values[0])

    return change


def setting(name, to, of=""):
    """Edit what the run, or a variable, says about itself; None takes it away."""

    def change(run):
        file = run / of / "zarr.json"
        known = json.loads(file.read_text())
        known["attributes"][name] = to
        if to is None:
            del known["attributes"][name]
        file.write_text(json.dumps(known))

    return change


def without_identity(run):
    made = json.loads((run / "zarr.json").read_text())["attributes"]["made"]
    setting("made", {name: value for name, value in made.items() if name != "identity"})(run)


def text(name, content):
    return lambda run: (run / name / "zarr.json").write_text(content) and None


EVERYWHERE = "its numbers at every sample and layer are not those that were computed"
HERE = "its numbers at sample 1 layer 0 are not those that were computed"
UNREAD = "a part of it cannot be read"
DAMAGE = [
    *((without_chunk(name), EVERYWHERE) for name in ("yudin", "exact_upper", "layer_name")),
    *((without_chunk(name), EVERYWHERE) for name in ("checksum", "head", "length", "exact")),
    *((without_chunk(name), "those that were comp") for name in ("yudin_sound", "layer", "sample")),
    (without_variable("checksum"), "the checksums of its numbers are missing"),
    (without_variable("yudin"), "'yudin' is missing"),
    (without_variable("exact"), "'exact' is missing"),
    (without_variable("lipbound_sound"), "'lipbound_sound' is missing"),
    (edited("length", 1, 99), "its numbers at sample 1 layer 0, sample 1 layer 1 are not those"),
    (edited("lipbound", (1, 0, 2), 1e-3), HERE),
    (swapped("exact_upper", "yudin"), EVERYWHERE),
    (cut("layer", 0), UNREAD),
    (cut("yudin", 9), UNREAD),
    (cut("yudin", 0), UNREAD),
    (text("yudin", "{"), UNREAD),
    (text("yudin", "[]"), UNREAD),
    (text("", "{}"), UNREAD),
    (text("", ""), UNREAD),
    (lambda run: (run / "zarr.json").unlink(), UNREAD),
    (setting("citation", "kim2021", "yudin"), "what 'yudin' says (its attributes) is not what it"),
    (setting("label", "Kim", "lipbound"), "what 'lipbound' says (its attr"),
    (setting("long_name", "upper end", "exact"), "what 'exact' says (its attributes) is not what"),
    (setting("tol", 0.1), "its settings (attributes) are not those that were recorded"),
    *((setting(name, {"yudin": 3}), "its settings (") for name in ("audit", "violations")),
    (setting("data", "ImageNet"), "its settings ("),
    (setting("samples", None), "its setting 'samples' is missing"),
    (setting("tol", "wide"), "its setting 'tol' is 'wide'"),
    (setting("dtype", "float8"), "its setting 'dtype' is 'float8'"),
    *((setting("norm", norm), "its setting") for norm in ("one-token", None, "every", 3)),
    *((setting("wrt", wrt), "its setting") for wrt in ("values", "key", None)),
    (setting("bounds", ["yudin", "lipbound", "kim"]), "'kim' is missing"),
    (setting("extras", ["condition", "frobenios"]), "its setting 'extras' has 'frobenios'"),
    (without_identity, "its setting 'identity' is missing"),
]


@pytest.mark.parametrize("kind", range(len(DAMAGE)))
def test_a_damaged_run_is_refused_in_one_sentence(kind, sound, tmp_path):
    change, sentence = DAMAGE[kind]
    run = Path(shutil.copytree(sound, tmp_path / "run.zarr"))
    change(run)
    status, out, err = command(f"table {run}")
    assert (status, out, len(err.strip().splitlines())) == (2, "", 1)
    assert sentence in err
    assert "compute it again" in err
    if "those that were" in sentence:
        with pytest.warns(DamagedRunWarning, match="damaged or was edited"):
            ds = lb.load(run)
        accused = {name for name, entry in audit(ds).items() if entry["violations"]}
        assert accused == ({"lipbound"} if sentence == HERE else set())


def test_every_command_refuses_it(sound, tmp_path, monkeypatch):
    run = Path(shutil.copytree(sound, tmp_path / "run.zarr"))
    edited("lipbound", (1, 0, 2), 1e-3)(run)
    monkeypatch.chdir(tmp_path)
    for line in ("heatmap {run} -o x.pdf", "cite {run}", "report {run} -o x.html"):
        status, _, err = command(line.format(run=run))
        assert (status, HERE in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.zarr"]


def test_settings_of_runs_put_together_are_looked_at(whole, tmp_path):
    parts = [whole.isel(sample=[0]), whole.isel(sample=[1])]
    path = lb.save(lb.concat(parts), tmp_path / "run.zarr")
    runs = json.loads((path / "zarr.json").read_text())["attributes"]["runs"]
    runs[0]["made"].pop("identity")
    setting("runs", runs)(path)
    refused(lambda: lb.load(path), "its setting 'identity' is missing", error=AlteredRunError)


def test_what_is_as_it_was_is_read_without_a_word(sound, whole):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamagedRunWarning)
        ds = lb.load(sound)
        assert ds["exact"].identical(whole["exact"])
        assert lb.load(sound, damaged="refuse").identical(ds)
    refused(lambda: lb.load(sound, damaged="refused"), "did you mean 'refuse'")


def test_words_of_variables_stay_with_runs_and_parts_of_them(whole, tmp_path):
    parts = [whole.isel(sample=[0]), whole.isel(sample=[1])]
    runs = [whole.isel(layer=[1]), lb.concat(parts), lb.diff(whole, whole), whole]
    for number, ds in enumerate(runs):
        for name in (f"{number}.zarr", f"{number}.nc"):
            assert lb.load(lb.save(ds, tmp_path / name), damaged="refuse").sizes == ds.sizes
    noted = whole.copy()
    noted["yudin"].attrs["units"] = "1"  # whoever adds something changes nothing
    assert faults(noted) == []
    noted["yudin"].attrs["citation"] = "kim2021"
    sentence = "what 'yudin' says (its attributes) is not what it said"
    diff = lb.save(lb.diff(whole, whole).assign(yudin_a=noted["yudin"]), tmp_path / "d.zarr")
    for use in (
        lambda: lb.concat([noted.isel(sample=[0]), parts[1]]),
        lambda: lb.diff(noted, whole),
        lambda: lb.load(diff, damaged="refuse"),
    ):
        refused(use, sentence, error=StoreError)
    assert sentence in lb.verify(noted, places=1, data=TEXTS).problems


def test_a_finished_run_is_not_taken_up_when_it_is_damaged(sound, tmp_path):
    run = Path(shutil.copytree(sound, tmp_path / "run.zarr"))
    without_chunk("yudin")(run)
    options = {**OPTIONS, "out": run, "resume": True}
    bert = json.loads((run / "zarr.json").read_text())["attributes"]["model"]
    refused(lambda: lb.compare(bert, TEXTS, **options), EVERYWHERE, error=AlteredRunError)


def test_what_is_not_there_is_not_compared(gpt2_run):
    ds = gpt2_run.copy(deep=True)
    ds["yudin"][0] = np.nan
    ds["exact"][1, 0] = np.nan
    ds["castin"][...] = np.nan
    found = audit(ds)
    counts = [found["yudin"][word] for word in ("violations", "compared", "broken")]
    assert counts == [0, 4, 0]
    assert (found["castin"]["violations"], found["castin"]["compared"]) == (0, 0)
    assert np.isnan(found["castin"]["worst"])
    assert [missing(ds, name) for name in ("yudin", "exact", "lipbound")] == [8, 4, 0]
    ds["lipbound"][0, 1, 0] = 0.5 * ds["exact"][0, 1, 0]
    found = audit(ds)["lipbound"]  # what is there is
    assert (found["violations"], found["broken"], found["compared"]) == (1, 1, 12)
    assert found["worst"] == pytest.approx(0.5)
    text = " ".join(lb.tables.render(ds).split())
    assert "Yudin 2025, Thm 3 (yudin): no value at 8 of 12" in text
    assert "exact norms: no value at 4 of 16" in text
