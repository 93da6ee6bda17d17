"""Statements of bounds as MathML: what is a formula is typeset, what is a word or foreign stays
text."""

import re
from html import escape
from xml.etree import ElementTree

import pytest

import lipbound as lb
from lipbound.formatting import formula


def words_of(html: str) -> str:
    """The text of some HTML, which must be well-formed."""
    return "".join(ElementTree.fromstring(f"<p>{html}</p>").itertext())


@pytest.mark.parametrize("name", lb.bounds.names(None))
def test_every_statement_says_the_same_in_latex(name: str) -> None:
    bound = lb.bounds.get(name)
    html = formula(bound.statement_latex)
    assert html.count("<math") == bound.statement_latex.count("$") // 2 > 0
    shown = words_of(html)
    assert "\\" not in shown
    assert "$" not in shown
    assert shown.count("\u2016") == bound.statement.count("||")
    for letter in "JWVQKAXRNP":
        assert shown.replace("diag", "").replace("and", "").count(letter) == len(
            re.findall(rf"{letter}(?![a-z]{{2}})", bound.statement)
        ), letter  # nothing is lost


BROKEN = ["(a", "a)", "||x", "x_", "^2", "]", "(" * 5000, "a | b || c ] <script>"]
FOREIGN = [
    "$<img src=x onerror=alert(1)>$",
    r"$\text{<script>alert(1)</script>}$",
    r"$\href{javascript:alert(1)}{x}$",
    r"$\style{color:red}{x}$",
    "$a",
    "$x_$ <script>",
]


@pytest.mark.parametrize("text", [*BROKEN, "</math><img src=x onerror=alert(1)>"])
def test_what_is_no_formula_is_text(text: str) -> None:
    found = words_of(formula(text)).replace("\u00a0", " ").strip()
    assert found == text.strip() or "<math>" in formula(text)
    assert "<img" not in formula(text)
    assert "<script" not in formula(text)


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_formulas_are_text(text: str) -> None:
    assert formula(text) == escape(text)
