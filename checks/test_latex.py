"""Tables and methods paragraphs typeset by pdflatex, citations by BibTeX; what the PDF says is what
the run says. Needs texlive and poppler-utils."""

import re
import subprocess
from pathlib import Path

import pytest
import xarray as xr

from lipbound import plots, tables
from lipbound.reporting import tables as citations

PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{booktabs, siunitx, pgf}
\usepackage[landscape, margin=1cm, paperwidth=60cm]{geometry}
\begin{document}\tiny
"""


def typeset(
    folder: Path, body: str, *, bibliography: str | None = None, preamble: str = PREAMBLE
) -> str:
    """The text of the PDF; any LaTeX or BibTeX error fails."""
    end = "\\bibliographystyle{plain}\\bibliography{refs}\n" if bibliography is not None else ""
    (folder / "x.tex").write_text(f"{preamble}{body}\n{end}\\end{{document}}\n", encoding="utf-8")
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "x.tex"]
    if bibliography is not None:
        (folder / "refs.bib").write_text(bibliography, encoding="utf-8")
        subprocess.run(latex, cwd=folder, check=True, capture_output=True, timeout=120)
        done = subprocess.run(
            ["bibtex", "x"], cwd=folder, check=False, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
        assert "Warning" not in done.stdout, done.stdout
        subprocess.run(latex, cwd=folder, check=True, capture_output=True, timeout=120)
    done = subprocess.run(
        latex,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "undefined" not in done.stdout.lower() or bibliography is None
    return subprocess.run(
        ["pdftotext", "-layout", "x.pdf", "-"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize("by", tables.BY)
def test_tables_are_typeset(ds: xr.Dataset, tmp_path: Path, by: str) -> None:
    text = typeset(tmp_path, tables.latex(ds, by=by, width=1200))
    shown = tables.readable(ds)
    if by == "bound":
        for name in ("yudin", "lipbound", "yudin_sqrt_n"):
            # the root is drawn
            label = shown.loc[name, "bound"].rstrip(" †‡").replace("sqrt(N)", "N")
            (line,) = [
                line
                for line in text.replace("√", "").splitlines()
                if re.match(rf"{re.escape(label)} ?[†‡]* ?\d", " ".join(line.split()))
            ]
            assert shown.loc[name, "geom. mean"] in line
            # a dash in T1
            assert shown.loc[name, "range over samples"].replace(" to ", "–") in line.replace(
                "\x15", "–"
            )
    else:
        assert (
            len([line for line in text.splitlines() if re.match(r"\s*\d+ ", line)])
            >= {"layer": 6, "head": 24}[by]
        )


def test_paragraph_and_bibliography(ds: xr.Dataset, tmp_path: Path) -> None:
    text = typeset(tmp_path, citations.cite(ds, "latex"), bibliography=citations.cite(ds, "bib"))
    assert "builtin:gpt2" in text
    assert "Pay attention to attention distribution" in re.sub(r"\s+", " ", text)
    assert "[?]" not in text
    assert len(re.findall(r"^\s*\[\d\] ", text, re.MULTILINE)) == len(citations.citation_keys(ds))


def test_pgf_figures_are_typeset(hostile: xr.Dataset, tmp_path: Path) -> None:
    plots.heatmaps(hostile, tmp_path / "figure.pgf", bounds=["yudin", "lipbound"])
    text = typeset(tmp_path, "\\input{figure.pgf}")
    assert "lipbound" in text
    assert "root:" not in text


@pytest.mark.parametrize("by", tables.BY)
def test_hostile_names_are_text(hostile: xr.Dataset, tmp_path: Path, by: str) -> None:
    body = f"{tables.latex(hostile, by=by)}\n\n{citations.cite(hostile, 'latex')}"
    text = typeset(tmp_path, body, bibliography=citations.cite(hostile))
    assert "root:" not in text  # a line of the file that the name tries to read
    assert "\\input{/etc/passwd}" in text
    assert "[U+21AF]" in text


def test_an_ordinary_document_is_enough(hostile: xr.Dataset, tmp_path: Path) -> None:
    """With the packages that the comment above a table names, in LaTeX's own fonts."""
    other = hostile.copy(deep=True)
    other["yudin"].attrs["label"] = '[0pt] \u03bb "x" \u0110\u1ee9c \u0127 caf\u00e9 <|>'
    other["castin"].attrs["label"] = "\u03bb first"
    preamble = (
        "\\documentclass{article}\n\\usepackage{booktabs, siunitx}\n\\begin{document}\\tiny\n"
    )
    for by in tables.BY:
        typeset(
            tmp_path,
            f"{tables.latex(other, by=by)}\n\n{citations.cite(other, 'latex')}",
            preamble=preamble,
        )
