"""Commands do what their words say; options that are mistyped or given twice are named."""

import dataclasses
import inspect
import re

import numpy as np
import pytest
import typer
from support.commands import command, said
from support.runs import TEXTS

import lipbound as lb
from lipbound import cli
from lipbound.cli import commands
from lipbound.runs.config import RunConfig

QUICK = {"samples": 1, "max_length": 8, "progress": False}
QUICKLY = "--samples 1 --max-length 8 --layers 0 --bounds castin --quiet"


def test_bounds_are_listed():
    out = said("bounds")
    for name in lb.bounds.names(None):
        # folded to the terminal
        assert "".join(lb.bounds.get(name).statement.split()) in "".join(out.split())
        assert f"{name}: {lb.bounds.get(name).label}" in out
    for norm in ("frobenius", "every-token", "one-token"):
        assert out.count(f"norm: {norm} (") == len(lb.bounds.names(norm))


def test_errors_in_full_where_they_are_asked_for():
    status, _, err = command("--debug compare builtin:gpt3")
    assert (status, "Traceback" in err) == (2, True)


# -- options and their help ------------------------------------------------------------------------


def test_every_command_has_help_with_an_example():
    for one in cli.app.registered_commands:
        assert (one.epilog or "").startswith("Example: lipbound "), one.callback
        assert one.callback.__doc__
        for paragraph in (one.help or "").split("\n\n"):  # folds where the terminal does
            assert "\n" not in paragraph
    made = {one.callback: one for one in cli.app.registered_commands}
    table = made[commands.table_command]
    assert "Then a table per bound lacks, in this order, max, min," in (table.help or "")


def test_options_are_those_of_the_configuration():
    """The same names and defaults in the signature, the configuration and the command."""
    config = {field.name: field for field in dataclasses.fields(RunConfig)}
    signature = inspect.signature(lb.compare).parameters
    assert list(signature) == list(config)
    parameters = inspect.signature(commands.compare_command).parameters
    assert set(parameters) - set(config) == {"scheduler"}
    assert set(config) - set(parameters) == {"client", "progress", "inputs"}
    for name, field in config.items():
        if name in parameters and field.default is not dataclasses.MISSING:
            assert signature[name].default == parameters[name].default == field.default, name


def described(docstring, section):
    """Names and their descriptions in a section of a docstring."""
    text = inspect.cleandoc(docstring).partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^    (\w+): (.+(?:\n        .+)*)", text, re.M))


def test_every_option_is_documented_once_and_helped():
    options = [field.name for field in dataclasses.fields(RunConfig)]
    help = described(RunConfig.__doc__ or "", "Attributes")
    assert list(help) == options
    told = described(inspect.getdoc(lb.compare) or "", "Args")
    assert set(told) == set(options)
    params = typer.main.get_command(cli.app).commands["compare"].params
    assert len(params) > len(options) - 3
    for param in params[: len(options) - 3]:
        assert param.help == " ".join(help[param.name].split()), param.name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare m --bounds yudin --bounds kim", "--bounds is given 2 times"),
        ("compare m --layers 0 --layers=1", "give it once, several values separated by commas"),
        ("compare m --samples 3 --tol 0.1 --samples 3", "--samples is given 2 times"),
        ("heatmap run.zarr -o a.pdf --output b.pdf", "--output is given 2 times"),
        ("verify run.zarr --model a --model b", "--model is given 2 times"),
        ("compare m --sample 3", "--samples"),
        ("compare m --max_length 3", "--max-length"),
        ("compare m --tolerance 3", "--tol"),
        ("compare m --dtyp x", "--dtype"),
        ("compare m --resum", "--resume"),
        ("table r --formt csv", "--format"),
        ("report r --no-detail", "--no-details"),
        ("sweep f --scedule x", "--scheduler"),
        ("compare m --xylophone-quux 3", "--xylophone-quux; see lipbound compare --help"),
        ("compare builtin:gpt2 --out 'my run.csv'", "name it 'my run.zarr', from which"),
        ("compare builtin:gpt2 --out run.PDF", "a run is a folder of its own kind; name it"),
        ("compare builtin:gpt2 --out run.npz", "a run is a folder of its own kind; name it"),
        ("sweep sweep.yaml --out runs.csv", "'runs.csv', which holds all runs of the sweep and"),
        ("demo --out demo.pdf", "'demo.pdf', which holds three runs and their figures; give the"),
        ("compare builtin:gpt2 --map heds", "did you mean 'heads'"),
        ("compare builtin:gpt2 --norm every-token --delta 1e-3", "delta is 0.001, which norm="),
    ],
)
def test_mistakes_are_named_before_anything_is_loaded(line, words, tmp_path, monkeypatch):
    (tmp_path / "sweep.yaml").write_text("model: builtin:gpt2\n")
    monkeypatch.chdir(tmp_path)
    loaded = pytest.fail
    monkeypatch.setattr("lipbound.runs.compare.load_checkpoint", lambda *_, **__: loaded("a model"))
    status, _, err = command(line)
    assert (status, len(err.strip().splitlines()), words in err) == (2, 1, True), err
    assert err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_without_a_command_the_help_is_shown_and_nothing_else():
    status, out, err = command("")
    assert (status, err, "compare" in out) == (2, "", True)


def test_what_is_taken_otherwise_is_told():
    words = "memory is 4 bytes, .* measured one at a time; write '4GB'", "here .*5"
    with pytest.warns(lb.Notice, match=words[0]), pytest.warns(lb.Notice, match=words[1]):
        ds = lb.compare("builtin:gpt2", bounds="castin", layers=[-1, 0], memory=4, **QUICK)
    assert 5 in ds["layer"].values
    assert any(re.search(words[1], note) for note in ds.attrs["notes"])


# -- exact norms alone -----------------------------------------------------------------------------


def test_no_bounds_are_exact_norms_alone():
    for bounds in ("none", "exact", []):
        assert RunConfig("m", bounds=bounds).names == []
    options = {"layers": [0], **QUICK}
    ds, other = (
        lb.compare("builtin:gpt2", TEXTS, bounds=one, **options) for one in ("none", "castin")
    )
    assert ds.attrs["bounds"] == []
    assert np.array_equal(ds["exact"], other["exact"])
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    inputs = lb.prepare(checkpoint, "the gulls", max_length=4).batch
    (layer,) = lb.capture(checkpoint.model, inputs, layers=[0])
    assert lb.bounds.evaluate(layer, "none") == {}


@pytest.mark.parametrize("bounds", ["exact", "yudin,castin"])
def test_a_run_goes_everywhere(bounds, bert, text, tmp_path):
    """With bounds, and of exact norms alone."""
    run, figure = tmp_path / "run.zarr", tmp_path / "run.pdf"
    options = f"--data {text} --samples 2 --max-length 16 --bounds {bounds} --layers 1 --quiet"
    out = said(f"compare {bert} {options} --out {run}")
    assert "layer 1 of 2 counted from 0, 4 heads" in out
    assert ("Yudin 2025, Thm 3" in out) == ("yudin" in bounds)
    ds = lb.load(run)
    assert ds.sizes == {"sample": 2, "layer": 1, "head": 4}
    assert ds.attrs["command"].startswith("lipbound compare")
    for line in (
        *(f"table {run} --format {form}" for form in ("text", "markdown", "latex", "csv")),
        f"table {run} --json",
        f"heatmap {run} -o {figure} --reduce 0.9 --scale panel",
        f"info {run}",
        f"cite {run} --format latex",
        f"verify {run} --places 1",
        f"report {run} -o {tmp_path / 'run.html'}",
    ):
        status, out, err = command(line)
        assert (status, err) == (0, ""), line
        assert "--format" not in line or ("Castin" in out) == ("castin" in bounds), line
    assert figure.stat().st_size > 1000
