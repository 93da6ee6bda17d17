"""What commands print is folded to the terminal, and nothing of it is lost there."""

import re

import numpy as np
import pytest
from rich.cells import cell_len as cells
from support.commands import said
from support.runs import made_up

from lipbound import tables
from lipbound.cli.commands import show
from lipbound.reporting.tables import text_table
from lipbound.runs import store


@pytest.fixture(scope="module")
def ds():
    return made_up()


@pytest.mark.parametrize("command", ["table RUN", "table RUN --by layer", "bounds"])
def test_commands_are_as_wide_as_the_terminal(command, ds, tmp_path, monkeypatch):
    run = store.save(ds, tmp_path / "up.zarr")
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        text = said(command.replace("RUN", str(run)))
        assert "\x1b" not in text
        assert 40 < max(map(cells, text.splitlines())) <= width


@pytest.mark.parametrize("by", tables.BY)
def test_numbers_stay_whole_at_every_width(ds, by):
    """Every number of the table as wide as it likes is in the narrow one, or its column is named as
    left out; so are all footnotes."""

    def rows(text):
        body = text.partition("----")[2].partition("\n\n\u2020")[0]
        return re.findall(r"(?<!\S)(?:\d[\d,.]*(?:e-?\d+)?|inf|n/a)(?!\S)", body)

    table = tables.table_of(ds, by)
    whole = text_table(table)
    for width in range(24, 140, 4):
        text = text_table(table, width)
        lost = set(rows(whole)) - set(rows(text))
        assert not lost or (by == "bound" and "no room for" in text)
        assert width < 40 or max(map(cells, text.splitlines())) <= width
        assert all("".join(note.split()) in "".join(text.split()) for note in table.notes)


def test_nothing_known_is_nothing_claimed(ds, capsys):
    empty = ds.copy(deep=True)
    empty["exact"][...] = np.nan
    bare = ds.assign_attrs(bounds=[])
    out = []
    for one in (empty, bare):
        show(one, [])
        out.append(" ".join(capsys.readouterr().out.split()))
    assert re.search(r"exact norms: 0 \(3 layers x 4 heads, .*", out[0])
    assert re.search(r"Yudin 2025, Thm 3 yudin n/a( n/a)* 0/0 n/a", out[0])
    assert "enclosed" not in out[0]
    assert "exact norms: 24 (3 layers x 4 heads, 2 samples), 0 to 3.76;" in out[1]
