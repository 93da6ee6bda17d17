"""What commands print at 60, 80 and 120 columns, as it is kept in ``terminals/``:
LIPBOUND_TERMINALS=write writes it anew, to be looked at."""

import contextlib
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from rich.cells import cell_len as cells
from support.runs import made_up

from lipbound import tables
from lipbound.cli import main
from lipbound.cli.application import show
from lipbound.errors import LipboundError
from lipbound.reporting.text_tables import text_table
from lipbound.runs import store

KEPT = Path(__file__).parent / "terminals"
COMMANDS = {
    "table": ("table", "RUN"),
    "by-layer": ("table", "RUN", "--by", "layer"),
    "by-head": ("table", "RUN", "--by", "head", "--bounds", "kim,yudin,lipbound"),
    "markdown": ("table", "RUN", "--format", "markdown"),
    "latex": ("table", "RUN", "--format", "latex"),
    "csv": ("table", "RUN", "--format", "csv"),
    "cite": ("cite", "RUN"),
    "cite-latex": ("cite", "RUN", "--format", "latex"),
    "cite-text": ("cite", "RUN", "--format", "text"),
    "bounds": ("bounds",),
    "compare": (),
}
FOLDED = ("table", "by-layer", "by-head", "bounds", "compare")
"""What adapts to the terminal; the others are for files, and the same everywhere."""
WIDTHS = (60, 80, 120)


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    return made_up()


@pytest.fixture(scope="module")
def run(ds: xr.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store.save(ds, tmp_path_factory.mktemp("made") / "up.zarr")


@pytest.fixture
def printed(
    run: Path, ds: xr.Dataset, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> object:
    """What a command prints in a terminal of some width."""

    def call(name: str, width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        if name == "compare":
            show(ds)
        else:
            monkeypatch.setattr(
                sys,
                "argv",
                ["lipbound", *(str(run) if part == "RUN" else part for part in COMMANDS[name])],
            )
            main_ends_well()
        out, err = capsys.readouterr()
        assert err == ""
        return str(out)

    return call


def main_ends_well() -> None:
    with contextlib.suppress(SystemExit):  # with an error it says something on standard error
        main()


def assert_same(text: str, kept: str, *, all_digits: bool) -> None:
    """Text that shows all digits of a float64 may differ in the last: logarithms are not the same
    on every processor."""
    if not all_digits:
        assert text == kept
        return
    found, expected = (re.split(r"([,\n])", part) for part in (text, kept))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == other or float(one) == pytest.approx(float(other), rel=1e-14)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_what_is_kept(
    name: str, width: int, printed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(printed)
    text = printed(name, width)
    file = KEPT / (f"{name}-{width}.txt" if name in FOLDED else f"{name}.txt")
    if os.environ.get("LIPBOUND_TERMINALS") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert_same(text, file.read_text(encoding="utf-8"), all_digits=name == "csv")
    assert "\x1b" not in text
    if name in FOLDED:
        assert max(map(cells, text.splitlines())) <= width


def test_nothing_is_kept_that_no_command_prints() -> None:
    expected = {f"{name}-{width}.txt" for name in FOLDED for width in WIDTHS} | {
        f"{name}.txt" for name in COMMANDS if name not in FOLDED
    }
    assert {path.name for path in KEPT.iterdir()} == expected


@pytest.mark.parametrize("by", tables.ROWS)
def test_numbers_stay_whole_at_every_width(ds: xr.Dataset, by: str) -> None:
    """Every number of the table as wide as it likes is in the narrow one, or its column is named as
    left out; so are all footnotes."""

    def rows(text: str) -> list[str]:
        return re.findall(
            r"(?<!\S)(?:\d[\d,.]*(?:e-?\d+)?|inf|n/a)(?!\S)",
            text.partition("----")[2].partition("\n\n\u2020")[0],
        )

    table = tables.table_of(ds, by)
    whole = text_table(table)
    for width in range(24, 140, 4):
        text = text_table(table, width)
        lost = set(rows(whole)) - set(rows(text))
        assert not lost or "no room for" in text
        if by != "bound":
            assert not lost
        if width >= 40:
            assert max(map(cells, text.splitlines())) <= width
        for note in table.notes:
            assert "".join(note.split()) in "".join(text.split())


def test_columns_leave_in_the_order_that_is_told(ds: xr.Dataset) -> None:
    left_out: list[str] = []
    table = tables.table_of(made_up(samples=5))
    for width in range(140, 14, -1):
        text = " ".join(text_table(table, width).split())
        (found,) = re.findall(r"no room for: (.*?) 95% interval: ", text) or [""]
        now = [name for name in found.split(", ") if name]
        assert now == list(tables.SPARE[: len(now)])
        assert len(now) >= len(left_out)
        left_out = now
    assert left_out == list(tables.SPARE)


def test_columns_with_something_below_exact_are_not_called_sound(ds: xr.Dataset) -> None:
    narrow = tables.render(ds, width=60)
    assert "none is below" not in narrow
    assert "\u2021: below the exact norm somewhere" in narrow


def test_nothing_known_is_nothing_claimed(ds: xr.Dataset, capsys: pytest.CaptureFixture) -> None:
    empty = ds.copy(deep=True)
    empty["exact"][...] = np.nan
    show(empty)
    out = capsys.readouterr().out
    assert "exact norms: 0 (" in out
    assert re.search(r"Yudin 2025, Thm 3 +yudin +n/a( +n/a)* +0/0 +n/a", out)
    assert "3 layers x 4 heads" in " ".join(out.split())
    assert "no exact norms" in " ".join(out.split())
    assert "enclosed" not in out
    bare = ds.assign_attrs(bounds=[])
    show(bare)
    out = " ".join(capsys.readouterr().out.split())
    assert "exact norms: 24 (3 layers x 4 heads, 2 samples), from 0 to 3.76;" in out
    assert "the tolerance asked for, 0.001, was not reached by 1 of 24, enclosed to 0.0041" in out


def test_widths_that_are_none(ds: xr.Dataset) -> None:
    for format, width, message in (
        ("latex", "colum", "did you mean 'column'"),
        ("latex", -3, "must be a number of points, at least 120"),
        ("latex", 3, "width is 3; it must be a number of points, at least 120, or one of"),
        ("text", "page", "number of characters"),
        ("csv", 80, "csv has none"),
        ("markdown", "page", "markdown has none"),
        ("text", 0, "number of characters"),
        ("text", 3, "width is 3; that of text is a number of characters, at least 15"),
    ):
        with pytest.raises(LipboundError, match=message):
            tables.render(ds, format, width=width)
