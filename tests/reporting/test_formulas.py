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


def test_statements_in_plain_text() -> None:
    said = {name: lb.bounds.get(name).statement for name in ("castin_c3", "yudin_g1", "kim")}
    assert said == {
        "castin_c3": "||J|| <= sqrt(3) ||W_V|| (R'^2 r^2 (N+1) + N)^(1/2), R' >= |A x_i| and "
        "|A^T x_i|, r = max_ij |x_i - x_j|",
        "yudin_g1": "||J|| <= ||W_V|| (||P|| + 2 ||X||^2 ||A|| max_i g_1(P_i)), g_1(p) = p_(1) (1 "
        "- p_(1) + p_(2))",
        "kim": "||J|| <= sqrt(N) scale (4 phi^(-1)(N-1) + 1) ||W_Q||^2 ||W_V||, phi(x) = x e^(x+1)"
        ", on L2 attention",
    }
    for name in lb.bounds.names(None):
        assert not set("\\${}") & set(lb.bounds.get(name).statement), name


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
