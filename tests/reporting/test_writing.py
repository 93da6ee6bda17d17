"""Figures and pages as files: all styles, fonts that papers take, full disks, and old files that
stay until new ones are whole."""

import errno
import io
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from support.runs import made_up
from tueplots import bundles

import lipbound as lb
from lipbound.cli import main
from lipbound.formatting import replacing
from lipbound.reporting.styles import look
from lipbound.runs import store

STYLES = [name for name in dir(bundles) if name[-4:].isdigit()]


@pytest.fixture(scope="module")
def ds():
    return made_up()


@pytest.mark.filterwarnings("ignore:style")
@pytest.mark.parametrize("style", STYLES)
def test_every_style_has_a_look(style):
    for width in ("column", "page", 4.0):
        settings, inches, _ = look(style, width, None)
        assert 2 < inches < 8
        assert settings["pdf.fonttype"] == settings["ps.fonttype"] == 42
        assert "text.usetex" not in settings


@pytest.mark.parametrize("style", ["aistats2025", "eccv2024"])
def test_venues_without_a_choice_of_tex_are_drawn(ds, style):
    with pytest.warns(UserWarning, match=f"style '{style}'.*left to TeX.*; STIXGeneral is taken"):
        lb.plots.heatmaps(ds, bounds=["yudin"], style=style)


def test_files_that_users_save_have_fonts_that_papers_take(ds):
    for figure, kind in (
        (lb.plots.heatmap(ds).figure, "pdf"),
        (lb.plots.ratios(ds, bounds=["yudin"]).figure, "ps"),
        (lb.plots.heatmaps(ds, bounds=["yudin"]), "pdf"),
    ):
        file = io.BytesIO()
        figure.savefig(file, format=kind)
        assert b"/Type3" not in file.getvalue()
        assert b"FontType 3" not in file.getvalue()


@pytest.mark.parametrize("kind", ["pdf", "png", "svg", "html"])
def test_a_full_disk_is_named_and_leaves_what_was_there(ds, kind, tmp_path):
    """And not what the writers of single formats fail with when they are broken off."""
    resource = pytest.importorskip("resource")
    path, before = tmp_path / f"x.{kind}", resource.getrlimit(resource.RLIMIT_FSIZE)
    page, figure = partial(lb.report, details=False), partial(lb.plots.heatmaps, bounds=["yudin"])
    write = page if kind == "html" else figure
    names = [path, *(tmp_path / f"x.caption.{end}" for end in ("tex", "txt") if kind != "html")]
    for name in names:
        name.write_text("old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(lb.errors.StoreError, match=r"cannot be written: File too large"):
            write(ds, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(tmp_path.iterdir()) == sorted(names)
    assert all(name.read_text() == "old" for name in names)


def test_files_replace_one_another_whole(tmp_path):
    target, link = tmp_path / "a.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with pytest.raises(lb.errors.StoreError, match=r"there is no folder .*new; make it first"):
        replacing(link, tmp_path / "new" / "b.txt").__enter__()
    (tmp_path / "new").mkdir()
    with replacing(link, tmp_path / "new" / "b.txt") as (one, other):
        one.write_text("1")
        other.write_text("2")
        assert target.read_text() == "old"
    assert (target.read_text(), (tmp_path / "new" / "b.txt").read_text()) == ("1", "2")
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ZeroDivisionError), replacing(target) as (one,):
        one.write_text(f"half {1 / 0}")
    assert target.read_text() == "1"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.txt", "link.txt", "new"]
    with replacing("/dev/null") as (one,):
        one.write_text("gone")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("command", ["table", "cite", "info"])
def test_output_that_nobody_takes_is_one_sentence(ds, tmp_path, command, monkeypatch, capsys):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = store.save(ds, tmp_path / "run.zarr")
    monkeypatch.setattr(sys, "argv", ["lipbound", command, str(run)])
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = "error: the output cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said


def test_ratios_far_beyond_the_others_leave_the_axis(ds):
    far = ds.copy(deep=True)
    far["specformer"][...] = far["exact"] * 1e177
    far["yudin"][1, 1, 1] = 1e200
    axes = lb.plots.ratios(far)
    low, high = axes.get_xlim()
    assert 0.1 < low < 1 < high < 1e6
    axes.figure.savefig(io.BytesIO(), format="png")
    words = {round(text.get_position()[1]): text.get_text() for text in axes.texts}
    names = [label.get_text() for label in axes.get_yticklabels()]
    said = {names[row - 1]: text for row, text in words.items()}
    assert said["Specformer 2024"] == "beyond: 1.0e177"
    assert said["Castin 3.5, mean field"] == "beyond: 4.0e302 to \u221e"
    assert said["Yudin 2025, Thm 3"].startswith("up to ")
    assert len(said) == 3
    nothing = far.copy(deep=True)
    nothing["exact"][...] = 0.0
    lb.plots.ratios(nothing).figure.savefig(io.BytesIO(), format="png")
