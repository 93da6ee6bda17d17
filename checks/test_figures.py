"""Heatmaps as PDF viewers show them, and their captions as LaTeX sets them: in articles, in two
columns, on slides. Needs texlive, poppler-utils."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import xarray as xr

from lipbound import plots
from lipbound.reporting.styles import paper_height

SHOTS = os.environ.get("LIPBOUND_SHOTS")
"""Folder for pictures, to be looked at."""
DOCUMENTS = {
    "column": (
        r"\documentclass[twocolumn]{article}\usepackage[letterpaper,text={7.1in,9in},columnsep=0.2in]{geometry}",
        "figure",
    ),
    "page": (
        r"\documentclass[twocolumn]{article}\usepackage[letterpaper,text={7.1in,9in},columnsep=0.2in]{geometry}",
        "figure*",
    ),
    "article": (
        r"\documentclass{article}\usepackage[a4paper,text={5.5in,9in}]{geometry}",
        "figure",
    ),
    "slide": (r"\documentclass[aspectratio=169]{beamer}", "figure"),
}


@pytest.mark.parametrize("width", DOCUMENTS)
@pytest.mark.parametrize("hostile_names", [False, True])
def test_figures_and_captions_fit_in_papers(
    ds: xr.Dataset, hostile: xr.Dataset, tmp_path: Path, width: str, hostile_names: bool
) -> None:
    shown = hostile if hostile_names else ds
    figure = plots.heatmaps(
        shown, tmp_path / "heads.pdf", width=5.5 if width == "article" else width
    )
    said = subprocess.run(
        ["pdfinfo", tmp_path / "heads.pdf"], capture_output=True, text=True, check=True
    ).stdout
    wide, high = (
        float(x) / 72 for x in re.search(r"Page size: +([\d.]+) x ([\d.]+) pts", said).groups()
    )
    assert wide == pytest.approx(figure.get_figwidth(), abs=0.02)
    assert high <= paper_height(wide) + 0.02
    head, environment = DOCUMENTS[width]
    frame = ("\\begin{frame}\\tiny", "\\end{frame}") if width == "slide" else ("", "")
    size = "height=0.5\\textheight" if width == "slide" else "width=\\linewidth"
    (tmp_path / "paper.tex").write_text(
        f"{head}\n\\usepackage{{graphicx}}\n\\begin{{document}}\n{frame[0]}\n\\begin{{{environment}}}\n\\centering\n"
        f"\\includegraphics[{size}]{{heads.pdf}}\n\\input{{heads.caption}}\n\\end{{{environment}}}\n{frame[1]}\nText.\n\\end{{document}}\n"
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    log = (tmp_path / "paper.log").read_text(errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    over = [float(x) for x in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
    assert max(over, default=0.0) <= 1.0, log[log.index("Overfull") :][:600]
    # hostile captions are as long as they like
    assert hostile_names or "Float too large" not in log
    words = re.sub(
        r"-?\s+",
        "",
        subprocess.run(
            ["pdftotext", tmp_path / "paper.pdf", "-"], capture_output=True, text=True, check=True
        ).stdout,
    )
    assert "ofthelocalLipschitzconstantanditsbounds" in words
    if not hostile_names:  # hostile captions end where a slide does
        assert "bound/exact,geometricmean" in words
    if SHOTS:
        folder = Path(SHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{width}{'-hostile' if hostile_names else ''}"
        subprocess.run(
            [
                "pdftoppm",
                "-r",
                "130",
                "-png",
                "-f",
                "1",
                "-l",
                "1",
                tmp_path / "paper.pdf",
                folder / name,
            ],
            check=True,
        )


def test_text_of_figures_is_text(ds: xr.Dataset, tmp_path: Path) -> None:
    plots.heatmaps(ds, tmp_path / "heads.pdf", caption=True)
    text = subprocess.run(
        ["pdftotext", "-layout", tmp_path / "heads.pdf", "-"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(ds["lipbound"].attrs["label"]) in text
    assert "bound / exact, geometric mean over samples" in re.sub(r"\s+", " ", text)
    fonts = subprocess.run(
        ["pdffonts", tmp_path / "heads.pdf"], capture_output=True, text=True, check=True
    ).stdout
    assert all(line.split()[-5] == "yes" for line in fonts.splitlines()[2:])  # embedded


def test_tools_are_there() -> None:
    for tool in ("pdflatex", "pdfinfo", "pdftoppm", "pdffonts"):
        assert shutil.which(tool), tool
