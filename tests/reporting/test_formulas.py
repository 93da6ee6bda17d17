"""Statements of bounds as MathML: what is a formula is typeset, what is a word or foreign stays text."""

from xml.etree import ElementTree

import pytest

import lipbound as lb
from lipbound.formatting.mathml import formula


def words_of(html: str) -> str:
    """The text of some HTML, which must be well-formed."""
    return "".join(ElementTree.fromstring(f"<p>{html}</p>").itertext())


@pytest.mark.parametrize("name", lb.bounds.names(None))
def test_every_statement_is_read(name: str) -> None:
    statement = lb.bounds.get(name).statement
    html = formula(statement)
    assert "<math>" in html
    shown = words_of(html)
    for sign in ("<=", "_", "^", "sqrt"):
        assert sign not in shown
    assert shown.count("\u2016") == statement.count("||")
    for letter in set(statement) & set("JWVQKAXRNP"):
        assert shown.count(letter) == statement.count(letter), letter  # nothing is lost


def test_powers_and_indices_belong_to_what_stands_before_them() -> None:
    def one(text: str) -> ElementTree.Element:
        return ElementTree.fromstring(formula(text))

    power = one("(R + N)^(1/2)")[0]
    assert power.tag == "msup"
    assert "".join(power[0].itertext()) == "(R+N)"
    assert "".join(power[1].itertext()) == "1/2"
    both = one("||X||_F^2")[0]
    assert [both.tag, *("".join(part.itertext()) for part in both)] == ["msubsup", "\u2016X\u2016", "F", "2"]
    assert one("max_ij |x_i|")[0].tag == "munder"
    assert one("sqrt(N)")[0].tag == "msqrt"
    outer = one("||E + diag ||B|| ||^2")[0]
    assert "".join(outer[0].itertext()) == "\u2016E+diag\u2016B\u2016\u2016"


@pytest.mark.parametrize("text", ["(a", "a)", "||x", "x_", "^2", "]", "(" * 5000, "</math><img src=x onerror=alert(1)>", "a | b || c ] <script>"])
def test_what_is_no_formula_is_text(text: str) -> None:
    assert words_of(formula(text)).replace("\u00a0", " ").strip() == text.strip() or "<math>" in formula(text)
    assert "<img" not in formula(text)
    assert "<script" not in formula(text)


def test_lines_break_between_formulas_and_words() -> None:
    html = formula("R' >= |A x_i| and |A^T x_i|, N x N")
    assert html.count("<math>") == 4
    assert " and " in html
    assert "\u00d7" in html
