"""Tables and methods paragraphs in the documents that people write: no box sticks out by more than
a point. Needs texlive."""

import re
import subprocess
from pathlib import Path

import pytest
import xarray as xr

from lipbound import tables
from lipbound.reporting import tables as citations

OVERFULL = re.compile(
    r"Overfull \\[hv]box \((\d+\.\d+)pt too|Float too large for page by (\d+\.\d+)pt"
)
ALLOWED = 1.0
"""Points."""
CLASSES = {
    "article": "\\documentclass{article}",
    "two columns": "\\documentclass[twocolumn, a4paper]{article}",
    "beamer": "\\documentclass{beamer}",
}
WIDTHS = {"article": ("column", "page"), "two columns": ("column",), "beamer": ("slide",)}
FLOAT = "\\begin{table}\\centering\n%s\\caption{Bounds}\\end{table}\n"
FRAME = "\\begin{frame}[allowframebreaks]{Bounds}\n%s\n\\end{frame}\n"


def log_of(folder: Path, body: str, preamble: str) -> str:
    """What LaTeX says of a document; an error fails."""
    text = (
        f"{preamble}\n\\usepackage{{booktabs, "
        f"siunitx}}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    )
    (folder / "document.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "document.tex"]
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return (folder / "document.log").read_text(errors="replace")


def too_large(log: str) -> list[str]:
    """What sticks out by more than is allowed."""
    return [match[0] for match in OVERFULL.finditer(log) if float(match[1] or match[2]) > ALLOWED]


@pytest.fixture(params=["gpt2", "minilm"])
def shown(request: pytest.FixtureRequest) -> xr.Dataset:
    """Runs of a causal model and of one with biases and 12 heads."""
    ds = request.getfixturevalue({"gpt2": "ds", "minilm": "minilm"}[request.param])
    assert isinstance(ds, xr.Dataset)
    return ds


@pytest.mark.parametrize("kind", CLASSES)
def test_nothing_sticks_out(kind: str, shown: xr.Dataset, tmp_path: Path) -> None:
    parts = [citations.methods(shown)]
    for width in WIDTHS[kind]:
        parts += [tables.latex(shown, by=by, width=width) for by in tables.BY]
    if kind == "beamer":
        body = "".join(FRAME % part for part in parts)
    else:
        body = "\n\n".join(
            [*parts, *(FLOAT % tables.latex(shown, width=width) for width in WIDTHS[kind])]
        )
    assert too_large(log_of(tmp_path, body, CLASSES[kind])) == []


@pytest.mark.parametrize("points", ["10pt", "11pt", "12pt"])
def test_the_default_fits_articles_of_every_size(
    points: str, shown: xr.Dataset, tmp_path: Path
) -> None:
    body = f"{citations.methods(shown)}\n\n{tables.latex(shown)}\n\n{FLOAT % tables.latex(shown)}"
    for columns in ("onecolumn", "twocolumn"):
        assert (
            too_large(log_of(tmp_path, body, f"\\documentclass[{points}, {columns}]{{article}}"))
            == []
        )


def test_what_sticks_out_is_seen(ds: xr.Dataset, tmp_path: Path) -> None:
    assert too_large(log_of(tmp_path, tables.latex(ds, width=900), CLASSES["two columns"]))
    assert too_large(log_of(tmp_path, FRAME % ("\\rule{1pt}{400pt}\n\n" * 2), CLASSES["beamer"]))
    assert too_large(log_of(tmp_path, "\\hbox to 10pt{\\rule{12pt}{1pt}}", CLASSES["article"]))
    assert not too_large(
        log_of(tmp_path, "\\hbox to 10pt{\\rule{10.9pt}{1pt}}", CLASSES["article"])
    )
