import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import typer
import xarray as xr
from support.commands import call
from support.models import build, no_attention, save_vit

import lipbound as lb
import lipbound.runs.store as store
from lipbound import cli
from lipbound.cli import measuring, reporting
from lipbound.errors import StoreError
from lipbound.runs.config import RunConfig


def test_compare_heatmap_table_cite(
    bert: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run.zarr"
    options = (
        "--data",
        text,
        "--samples",
        2,
        "--max-length",
        16,
        "--bounds",
        "yudin,castin",
        "--layers",
        "1",
        "--quiet",
    )
    status, out, err = call(capsys, monkeypatch, "compare", bert, *options, "--out", run)
    assert status == 0, err
    assert "Yudin 2025, Thm 3" in out
    assert "layer 1 of 2 counted from 0, 4 heads" in out
    ds = lb.load(run)
    assert ds.sizes == {"sample": 2, "layer": 1, "head": 4}
    assert ds.attrs["command"].startswith("lipbound compare")
    figure = tmp_path / "figure.pdf"
    status, out, _ = call(
        capsys,
        monkeypatch,
        "heatmap",
        run,
        "-o",
        figure,
        "--reduce",
        "0.9",
        "--scale",
        "panel",
        "--bounds",
        "yudin",
    )
    assert (status, figure.stat().st_size > 1000) == (0, True)
    for format in ("text", "markdown", "latex", "csv"):
        status, out, _ = call(capsys, monkeypatch, "table", run, "--format", format)
        assert status == 0
        assert "Castin 2024, 3.3" in out
    status, out, _ = call(capsys, monkeypatch, "cite", run)
    assert "@misc{yudin2025pay" in out


def test_bounds_are_listed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = call(capsys, monkeypatch, "bounds")
    assert status == 0
    for name in lb.bounds.names(None):
        # folded to the terminal
        assert "".join(lb.bounds.get(name).statement.split()) in "".join(out.split())
        assert f"{name}: {lb.bounds.get(name).label}" in out
    for norm in ("frobenius", "every-token", "one-token"):
        assert out.count(f"norm: {norm} (") == len(lb.bounds.names(norm))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "/no/such/dir"], "there is no directory"),
        (["compare", "builtin:gpt3"], "did you mean 'gpt2'"),
        (["compare", "builtin:gpt2", "--bounds", "yudn"], "did you mean"),
        (["compare", "builtin:gpt2", "--max-length", "1000"], "exceeds the 256 positions"),
        (["compare", "builtin:gpt2", "--layers", "a"], "layers is 'a'; give numbers from 0"),
        (["compare", "builtin:gpt2", "--layers", "9"], "numbered 0 to 5"),
        (["compare", "builtin:gpt2", "--data", "/no/file.txt"], "there is no file"),
        (["table", "/no/run.zarr"], "there is no run"),
        (["heatmap", "/no/run.zarr", "-o", "x.pdf"], "there is no run"),
    ],
)
def test_errors_are_one_sentence_and_status_two(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, _, err = call(capsys, monkeypatch, *arguments)
    assert status == 2
    assert sentence in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_without_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_vit(tmp_path)  # its processor serves
    build(no_attention).save_pretrained(tmp_path)
    status, _, err = call(capsys, monkeypatch, "compare", tmp_path, "--samples", 1)
    assert (status, "no attention that can be captured" in err) == (2, True)


def test_wrong_modality(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(tmp_path / "p.png")
    status, _, err = call(
        capsys, monkeypatch, "compare", bert, "--data", tmp_path / "p.png", "--max-length", 8
    )
    assert (status, "reads text" in err) == (2, True)


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = call(capsys, monkeypatch, "--debug", "compare", "builtin:gpt3")
    assert (status, "Traceback" in err) == (2, True)


def test_a_finished_run_is_rescued(
    bert: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, full_disk = store._save, [tmp_path]

    def some(ds: xr.Dataset, path: Path) -> Path:
        if any(path.is_relative_to(one) for one in full_disk):
            raise StoreError(f"{path} could not be written: No space left on device")
        return write(ds, path)

    monkeypatch.setattr(store, "_save", some)
    options = ("--data", text, "--samples", 1, "--max-length", 8, "--bounds", "castin", "--quiet")
    status, _, err = call(
        capsys, monkeypatch, "compare", bert, *options, "--out", tmp_path / "run.zarr"
    )
    assert status == 2
    refuge = Path(err.split("was saved to ")[1].split(" instead")[0])
    assert lb.load(refuge).sizes["sample"] == 1
    full_disk.append(Path("/"))  # nor is there room in the refuge
    out = tmp_path / "other.zarr"
    status, _, err = call(capsys, monkeypatch, "compare", bert, *options, "--out", out)
    last = err.strip().rpartition("\n")[2]
    assert (status, last) == (2, f"error: {out} could not be written: No space left on device")


def test_help_has_examples() -> None:
    for command in ("compare", "heatmap", "table", "cite", "bounds", "demo"):
        assert "Example: lipbound" in (
            next(
                c
                for c in cli.app.registered_commands
                if (c.name or c.callback.__name__).endswith(command)
            ).epilog
            or ""
        )


def test_paragraphs_of_help_fold_where_the_terminal_does() -> None:
    for command in cli.app.registered_commands:
        for paragraph in (command.help or "").split("\n\n"):
            assert "\n" not in paragraph
    table = next(one for one in cli.app.registered_commands if one.callback is reporting.table)
    assert "Then a table per bound lacks, in this order, max, min," in (table.help or "")


def test_options_are_those_of_the_configuration() -> None:
    """The same names, types and defaults in the signature, the configuration and the command."""
    config = {field.name: field for field in dataclasses.fields(RunConfig)}
    signature = inspect.signature(lb.compare).parameters
    assert set(signature) - set(config) == {"client", "progress", "inputs"}
    command = inspect.signature(measuring.compare).parameters
    assert set(command) - set(config) == {"scheduler"}
    for name, field in config.items():
        if field.default is not dataclasses.MISSING:
            assert signature[name].default == command[name].default == field.default, name
        written = str(signature[name].annotation)
        assert written in (field.type, "Any"), name


def described(docstring: str, section: str) -> dict[str, str]:
    """Names and their descriptions in a section of a docstring."""
    text = inspect.cleandoc(docstring).partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^    (\w+): (.+(?:\n        .+)*)", text, re.M))


def test_every_option_is_documented_once_and_helped() -> None:
    options = [field.name for field in dataclasses.fields(RunConfig)]
    help = described(RunConfig.__doc__ or "", "Attributes")
    assert list(help) == options
    told = described(inspect.getdoc(lb.compare) or "", "Args")
    assert set(told) == {*options, "client", "progress", "inputs"}
    params = typer.main.get_command(cli.app).commands["compare"].params
    for param in params[: len(options)]:
        assert param.help == " ".join(help[param.name].split()), param.name


def test_every_command_has_an_example() -> None:
    for command in cli.app.registered_commands:
        assert command.epilog is not None, command.callback
        assert command.epilog.startswith("Example: lipbound "), command.epilog
        assert command.callback is not None
        assert command.callback.__doc__
