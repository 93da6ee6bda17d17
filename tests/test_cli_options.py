"""Options of the command line that are given twice, mistyped or without a unit; exact norms
alone."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from support.commands import call
from support.runs import TEXTS

import lipbound as lb
from lipbound.cli.measuring import blocks_in
from lipbound.errors import Notice
from lipbound.runs.config import RunConfig

QUICK = {"samples": 1, "max_length": 8, "progress": False}


@pytest.fixture
def said(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Calls the command line, and returns its status, its output and its last line of errors."""

    def run(*words: object) -> tuple[int, str, str]:
        status, out, err = call(capsys, monkeypatch, *words)
        assert "Traceback" not in err
        return status, out, err.strip().rpartition("\n")[2]

    return run


@pytest.mark.parametrize(
    ("words", "option", "more"),
    [
        (
            "compare m --bounds yudin --bounds kim",
            "--bounds",
            ", with its names separated by commas",
        ),
        ("compare m --layers 0 --layers=1", "--layers", ", with its numbers separated by commas"),
        ("compare m --samples 3 --tol 0.1 --samples 3", "--samples", ""),
        ("heatmap run.zarr -o a.pdf --output b.pdf", "--output", ""),
        ("table run.zarr --format csv --format latex", "--format", ""),
        ("verify run.zarr --model a --model b", "--model", ""),
    ],
)
def test_an_option_given_twice_is_refused(said, words: str, option: str, more: str) -> None:
    status, _, error = said(*shlex.split(words))
    assert (status, error) == (
        2,
        f"error: {option} is given 2 times, and one of them would be ignored; give it once{more}",
    )


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("compare m --sample 3", "--samples"),
        ("compare m --sampels 3", "--samples"),
        ("compare m --max_length 3", "--max-length"),
        ("compare m --tolerance 3", "--tol"),
        ("compare m --output x", "--out"),
        ("compare m --dtyp x", "--dtype"),
        ("compare m --resum", "--resume"),
        ("table r --formt csv", "--format"),
        ("report r --no-detail", "--no-details"),
        ("verify r --place 3", "--places"),
        ("sweep f --scedule x", "--scheduler"),
    ],
)
def test_a_typo_is_matched_to_what_was_meant(said, words: str, meant: str) -> None:
    status, _, error = said(*shlex.split(words))
    assert (status, error) == (
        2,
        f"error: no such option: {words.split()[2]}; did you mean {meant}?",
    )


@pytest.mark.parametrize("word", ["--frobnicate", "--balls", "--xylophone-quux"])
def test_what_is_like_no_option_is_matched_to_none(said, word: str) -> None:
    error = said("compare", "m", word, "3")[2]
    assert error == f"error: no such option: {word}; see lipbound compare --help"


def test_without_a_command_the_help_is_shown_and_nothing_else(said) -> None:
    status, out, error = said()
    assert (status, error) == (2, "")
    assert "compare" in out


def test_memory_with_a_unit_or_of_a_size_is_taken() -> None:
    assert [
        RunConfig("m", memory=m).memory for m in ("4GB", "2000000", "4kB", 5, "1e9", " 16")
    ] == [
        4e9,
        2e6,
        4e3,
        5.0,
        1e9,
        16.0,
    ]


def test_a_few_bytes_are_told() -> None:
    with pytest.warns(
        Notice,
        match="memory is 4 bytes, so that samples are measured one at a time; write '4GB' for "
        "gigabytes",
    ):
        lb.compare("builtin:gpt2", bounds="castin", layers=[0], memory=4, **QUICK)


@pytest.mark.parametrize(
    "name",
    [
        *("my run.csv", "run.tex", "run.PDF", "run.html", "run.json", "run.bib", "run.jpeg"),
        *("run.nc", "run.npz"),
    ],
)
def test_a_run_is_no_file_of_another_kind(
    said, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = said("compare", "builtin:gpt2", "--out", name)
    run = shlex.quote(str(Path(name).with_suffix(".zarr")))
    assert (status, error) == (
        2,
        f"error: out is {name!r}, and a run is a folder of its own kind; name it {run}, from "
        "which lipbound table, heatmap, report and cite make files",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "sweep {yaml} --out runs.csv",
            "out is 'runs.csv', which holds all runs of the sweep and their index.csv; give a "
            "folder, such as 'runs'",
        ),
        (
            "demo --out demo.pdf",
            "out is 'demo.pdf', which holds three runs and their figures; give a folder, such "
            "as 'demo'",
        ),
    ],
)
def test_a_folder_is_no_file(
    said, words: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep.yaml").write_text("model: builtin:gpt2\n")
    monkeypatch.chdir(tmp_path)
    assert said(*shlex.split(words.format(yaml="sweep.yaml")))[::2] == (2, f"error: {error}")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


@pytest.mark.parametrize("layers", ["-1", [-1, 0]])
def test_layers_from_the_end_are_told(layers: object) -> None:
    with pytest.warns(Notice, match="layers below zero count from the end: here .*5"):
        ds = lb.compare("builtin:gpt2", bounds="castin", layers=layers, **QUICK)
    assert 5 in ds["layer"].values
    assert any("layers below zero count from the end" in note for note in ds.attrs["notes"])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--device gpu", "device 'gpu' cannot be used here"),
        ("--dtype half", "dtype is 'half'; allowed are 'float32' and 'float64'"),
        ("--weights ram", "unknown weights 'ram'; allowed are auto, layers, whole"),
        ("--max-length 0", "max_length is 0; it must be a whole number"),
        ("--max-length x", "invalid value for '--max-length'"),
        ("--norm l2", "unknown norm 'l2'"),
        ("--map heds", "did you mean 'heads'"),
    ],
)
def test_bad_values_are_refused_before_anything_is_loaded(
    said, words: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lipbound.runs.plan.load_checkpoint", lambda *_, **__: pytest.fail("a model was loaded")
    )
    status, _, found = said("compare", "builtin:gpt2", *words.split())
    assert (status, error in found) == (2, True), found


def test_the_hint_after_saving_can_be_pasted(said, tmp_path: Path) -> None:
    run, quick = (
        tmp_path / "my run.zarr",
        "--samples 1 --max-length 8 --layers 0 --bounds castin --quiet",
    )
    status, out, _ = said("compare", "builtin:gpt2", *quick.split(), "--out", run)
    assert status == 0
    hint = out.strip().rpartition("draw it with: ")[2]
    assert shlex.split(hint)[:3] == ["lipbound", "heatmap", str(run)]


# -- exact norms alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", ["none", "exact", []])
def test_no_bounds_are_exact_norms_alone(bounds: object) -> None:
    ds = lb.compare("builtin:gpt2", TEXTS, bounds=bounds, layers=[0], **QUICK)
    assert ds.attrs["bounds"] == []
    other = lb.compare("builtin:gpt2", TEXTS, bounds="castin", layers=[0], **QUICK)
    assert np.array_equal(ds["exact"], other["exact"])
    assert lb.bounds.evaluate(lb.capture(*_small(), layers=[0])[0], "none") == {}


def _small():
    checkpoint = lb.load_checkpoint("builtin:gpt2")
    return checkpoint.model, lb.prepare(checkpoint, "the gulls", max_length=4).batch


def test_a_run_of_exact_norms_alone_goes_everywhere(said, tmp_path: Path) -> None:
    run, quick = (
        tmp_path / "run.zarr",
        "--samples 1 --max-length 8 --layers 0 --bounds exact --quiet",
    )
    assert said("compare", "builtin:gpt2", *quick.split(), "--out", run)[0] == 0
    commands = [("table", run, "--format", form) for form in ("text", "markdown", "latex", "csv")]
    commands += [
        ("table", run, "--by", "layer"),
        ("table", run, "--json"),
        ("heatmap", run, "-o", tmp_path / "run.pdf"),
    ]
    commands += [
        ("info", run),
        ("cite", run),
        ("cite", run, "--format", "latex"),
        ("verify", run, "--places", 1),
        ("report", run, "-o", tmp_path / "run.html"),
    ]
    for words in commands:
        status, _, error = said(*words)
        assert (status, error) == (0, ""), words


def test_what_an_interruption_finds_where_the_run_is_saved(tmp_path: Path) -> None:
    assert blocks_in(None, False) == "nothing was kept, since there was no --out"
    assert blocks_in(tmp_path / "run.zarr", False) == "nothing was measured yet"
    assert blocks_in(tmp_path, True) == f"{tmp_path} was there already, and nothing was written"
    assert blocks_in(tmp_path, False) == f"the run is finished and saved in {tmp_path}"
