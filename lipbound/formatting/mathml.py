"""Formulas as bounds state them, such as ``||J|| <= sqrt(3) ||W_V|| (R^2 + N)^(1/2)``, as MathML; what is no formula stays text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

TOKEN = re.compile(r"\|\||<=|>=|->|\d+(?:\.\d+)?|[A-Za-z]+\d*|\s+|.", re.DOTALL)
OPENING = {"(": ")", "[": "]", "|": "|", "||": "||"}
SHOWN = {"||": "\u2016", "<=": "\u2264", ">=": "\u2265", "->": "\u2192", "-": "\u2212", "*": "\u00b7", "'": "\u2032"}
GREEK = {"phi": "\u03c6", "gamma": "\u03b3", "sigma": "\u03c3", "lambda": "\u03bb"}
FUNCTIONS = ("max", "min", "exp", "diag", "sum", "log", "softmax", "scale")
"""Names of several letters that belong to a formula."""
RELATIONS = ("<=", ">=", "=", "->")


class NoFormulaError(ValueError):
    """The text is not a formula: brackets do not match, or an index is missing."""


@dataclass
class Reader:
    """Tokens of a text, read one after the other."""

    tokens: list[str]
    at: int = 0
    open: list[str] = field(default_factory=list)

    def peek(self, ahead: int = 0) -> str:
        """The token there, or "" behind the end."""
        place = self.at + ahead
        return self.tokens[place] if 0 <= place < len(self.tokens) else ""

    def take(self) -> str:
        """The next token, which is then behind."""
        self.at += 1
        return self.tokens[self.at - 1]

    def closes(self) -> bool:
        """Whether the next token ends the innermost bracket: bars do behind a symbol, or before a gap where nothing can begin."""
        token = self.peek()
        if not self.open or OPENING[self.open[-1]] != token:
            return False
        before, after = self.peek(-1), self.peek(1)
        return token in ")]" or not before.isspace() or not after or after.isspace() or after in ")],^_"


def formula(text: str) -> str:
    """HTML of a statement: MathML for its formulas, escaped text for its words; all of it as text where it cannot be read.

    A formula is several ``math`` elements, one after each relation, comma or word, since browsers break lines only between them.

    >>> formula("||x_1|| <= 2")
    '<math><mrow><mo>\u2016</mo><msub><mi>x</mi><mn>1</mn></msub><mo>\u2016</mo></mrow><mo>\u2264</mo></math> <math><mn>2</mn></math>'
    """
    try:
        return " ".join(_pieces(Reader(TOKEN.findall(text))))
    except (NoFormulaError, RecursionError):
        return escape(text)


def _pieces(reader: Reader) -> Iterator[str]:
    """Formulas and words, in order."""
    terms: list[str] = []

    def done() -> Iterator[str]:
        if any(terms):
            yield f"<math>{''.join(terms)}</math>"
        terms.clear()

    while reader.peek():
        token = reader.peek()
        if token.isspace():
            terms.append(_gap(reader))
        elif _is_word(reader):
            yield from done()
            yield _words(reader)
        else:
            terms.append(_term(reader))
            if token in (*RELATIONS, ",", ";"):
                yield from done()
    yield from done()


def _gap(reader: Reader) -> str:
    """A thin space between factors; none beside operators, brackets and words, which have their own."""
    reader.take()
    before, after = reader.peek(-2), reader.peek()
    factors = (before.isalnum() or before in ("|", "||", ")", "]", "'")) and (after.isalnum() or after in OPENING) and not reader.closes()
    return '<mspace width="0.2em"></mspace>' if factors and not _is_word(reader) else ""


def _is_word(reader: Reader) -> bool:
    """Whether the next token is a word of a sentence."""
    token = reader.peek()
    named = token in FUNCTIONS or token in GREEK or token == "sqrt"
    return len(token) > 1 and token[0].isalpha() and not named and reader.peek(1) not in ("_", "^")


def _words(reader: Reader) -> str:
    """Words and what stands between them, up to the next formula."""
    found = [reader.take()]
    while reader.peek() and (reader.peek().isspace() or reader.peek() in ",.;:" or _is_word(reader)):
        found.append(reader.take())
    return escape("".join(found).strip())


def _row(reader: Reader) -> str:
    """Everything up to a closing bracket, which is taken too."""
    terms: list[str] = []
    while True:
        if not reader.peek():
            raise NoFormulaError
        if reader.closes():
            reader.take()
            reader.open.pop()
            return "".join(terms)
        if reader.peek().isspace():
            terms.append(_gap(reader))
        elif _is_word(reader):
            terms.append(f"<mtext>&#160;{_words(reader)}&#160;</mtext>")
        else:
            terms.append(_term(reader))


def _term(reader: Reader) -> str:
    """A symbol or a group, with its indices and powers."""
    token = reader.peek()
    base, below = _base(reader), token in ("max", "min", "sum")
    while reader.peek() == "'":
        reader.take()
        base = f"<msup>{base}<mo>{SHOWN[chr(39)]}</mo></msup>"
    lower = _script(reader) if reader.peek() == "_" else ""
    upper = _script(reader) if reader.peek() == "^" else ""
    if lower and upper:
        return f"<msubsup>{base}{lower}{upper}</msubsup>"
    if lower:
        return f"<munder>{base}{lower}</munder>" if below else f"<msub>{base}{lower}</msub>"
    return f"<msup>{base}{upper}</msup>" if upper else base


def _base(reader: Reader) -> str:
    """A symbol or a group without indices."""
    token = reader.peek()
    if token in OPENING:
        reader.take()
        reader.open.append(token)
        left, right = (escape(SHOWN.get(c, c)) for c in (token, OPENING[token]))
        return f"<mrow><mo>{left}</mo>{_row(reader)}<mo>{right}</mo></mrow>"
    if token in ")]" or token in ("_", "^"):
        raise NoFormulaError
    reader.take()
    if token == "sqrt" and reader.peek() == "(":
        reader.take()
        reader.open.append("(")
        return f"<msqrt>{_row(reader)}</msqrt>"
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token == "x" and reader.peek(-3) == reader.peek(1) == "N":
        return "<mo>\u00d7</mo>"  # N x N
    if token == "sum":
        return "<mo>\u2211</mo>"
    if token in FUNCTIONS:
        return f'<mi mathvariant="normal">{token}</mi>'
    if token[0].isalpha():
        return f"<mi>{escape(GREEK.get(token, token))}</mi>"
    return f"<mo>{escape(SHOWN.get(token, token))}</mo>"


def _script(reader: Reader) -> str:
    """An index or a power: a symbol, a number, or a group, which needs no brackets there; a sign may stand before it."""
    lower = reader.take() == "_"
    if not reader.peek() or reader.peek().isspace():
        raise NoFormulaError
    if reader.peek() == "-":
        reader.take()
        return f"<mrow><mo>\u2212</mo>{_base(reader)}</mrow>"
    if reader.peek() == "(":
        reader.take()
        reader.open.append("(")
        inner = _row(reader)
        return f"<mrow><mo>(</mo>{inner}<mo>)</mo></mrow>" if lower else f"<mrow>{inner}</mrow>"
    if lower and reader.peek().isalpha():
        return f"<mrow>{''.join(f'<mi>{c}</mi>' for c in reader.take())}</mrow>" if len(reader.peek()) > 1 else f"<mi>{reader.take()}</mi>"
    return _base(reader)
