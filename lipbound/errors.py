"""Errors that users meet, and checks of arguments.

Each message is one sentence that says what was given, what is allowed and what to try.
"""

import difflib
import inspect
import itertools
import math
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_HERE = str(PurePath(__file__).parent)
"""What the paths of our own modules begin with."""


class Notice(UserWarning):
    """Something is not as it was asked for, and the work goes on; the command line prints it."""


def tell(*messages: str) -> None:
    """Warn with a `Notice` each; a run keeps the same sentences in its attribute ``notes``."""
    for message in messages:
        warn(message, Notice)


def warn(message: str, kind: type[Warning]) -> None:
    """Warn at the line outside of lipbound that called it, however deep inside it was noticed."""
    stack = traceback.walk_stack(sys._getframe())
    frames = [str(one.f_globals.get("__name__", "")).partition(".")[0] for one, _ in stack]
    outermost = len(frames) - frames[::-1].index(__package__)
    warnings.warn(message, kind, stacklevel=outermost + 1)


class LipboundError(ValueError):
    """Base of every error that bad input can cause; the command line exits with status 2."""

    def _render_traceback_(self) -> list[str]:
        """Show in a notebook where the user's own lines are, and what is wrong.

        ``%debug`` goes to where it was raised.
        """
        steps = traceback.extract_tb(self.__traceback__)
        outside = itertools.takewhile(lambda step: not step.filename.startswith(_HERE), steps)
        own = [step for step in outside if "-packages" not in step.filename]
        said = f"\x1b[1;31m{type(self).__name__}: {self}\x1b[0m"
        return [line.rstrip() for line in (*traceback.format_list(own), said)]


class AttentionError(LipboundError):
    """The tensors handed to `Attention` do not form an attention layer."""


class CaptureError(LipboundError):
    """A model's attention could not be captured, or the capture does not reproduce the model."""


class DifferentPositionsError(CaptureError):
    """The samples of a batch have different positions, so that they must be captured one by one."""


class UnfaithfulPassError(CaptureError):
    """The model computes something else in the pass that is captured than when it runs alone."""


class CheckpointError(LipboundError):
    """A checkpoint could not be found or loaded."""


class InputsError(LipboundError):
    """The data cannot be turned into inputs of the model."""


class StoreError(LipboundError):
    """A run cannot be written to, or read from, where it was asked for.

    Attributes:
        dataset: the finished run that could not be saved, where there is one.
    """

    dataset: Any = None


class AlteredRunError(StoreError):
    """A stored run is not as it was computed: files, numbers or settings are damaged or changed."""


class DamagedRunWarning(UserWarning):
    """A run was loaded although it is not as it was computed."""


class RangeError(LipboundError):
    """Numbers leave the range of the dtype on the way."""


class TooLargeError(LipboundError):
    """A matrix is too large to be formed for this number."""


class MemoryFullError(LipboundError):
    """A device has no memory left for a computation."""


class PaperError(LipboundError):
    """Panels of a figure do not fit on the paper."""


class UnknownNameError(LipboundError):
    """A name that is not in a registry."""


def is_number(value: object) -> bool:
    """Return whether a value is a real number of Python, numpy or torch, and not NaN."""
    try:
        return not isinstance(value, str | bytes) and not math.isnan(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def shown(value: object) -> str:
    """Return a value as a message quotes it: short ones in full, others by their type.

    >>> shown("8"), shown([1, 2]), shown(object())
    ("'8'", '[1, 2]', 'of type object')
    """
    plain = isinstance(value, int | float | str | bytes | list | tuple | set | dict | range | None)
    text = " ".join(repr(value).split()) if plain else ""
    if plain and len(text) <= 80:
        return text
    if isinstance(value, str):
        return text[:79] + "...'"
    if hasattr(value, "shape") and not tuple(value.shape) and not isinstance(value, type):
        return " ".join(str(value).split())[:80]
    return f"of type {type(value).__name__}"


def _is_array(value: object) -> bool:
    """Return whether it has axes, rather than being one number."""
    return bool(getattr(value, "shape", False))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def whole(
    name: str, value: Any, *, least: int | None = None, error: type[LipboundError] = LipboundError
) -> int:
    """Check an argument that is a whole number, of Python, numpy or torch.

    Args:
        name: of the argument.
        value: what was given.
        least: the smallest that is allowed.
        error: the type that is raised for anything else, such as text, fractions, True and False.

    Returns:
        The number.

    >>> whole("samples", 8, least=1)
    8
    """
    try:
        number = None if _is_bool(value) or _is_array(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or (least is not None and number < least):
        at_least = "" if least is None else f", at least {least}"
        raise error(f"{name} is {shown(value)}; it must be a whole number{at_least}")
    return number


def real(
    name: str, value: Any, must: str, *, above: float = -math.inf, below: float = math.inf
) -> float:
    """Check an argument that is a finite number strictly between two others.

    Args:
        name: of the argument.
        value: what was given.
        must: what it must be, in words.
        above: a number that is too small.
        below: a number that is too large.

    Returns:
        The number.

    Raises:
        LipboundError: anything else, such as True and False.

    >>> real("tol", 0.001, "between 0 and 1", above=0, below=1)
    0.001
    """
    number = not isinstance(value, bool) and not _is_array(value) and is_number(value)
    if not number or not above < float(value) < below:
        raise LipboundError(f"{name} is {shown(value)}; it must be {must}")
    return float(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Check an argument that is one of some names.

    Args:
        name: of the argument.
        value: what was given.
        allowed: the names.

    Returns:
        The name.

    Raises:
        UnknownNameError: anything else; the message has the nearest name.
    """
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise UnknownNameError(f"unknown {name} {shown(value)}; {nearest(value, allowed)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Check an argument that is True or False.

    Args:
        name: of the argument.
        value: what was given.

    Returns:
        Its value.

    Raises:
        LipboundError: anything else.
    """
    if _is_array(value) or not _is_bool(value):
        raise LipboundError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def one_line(error: BaseException) -> str:
    r"""Return the message of an error of the system or of another package, on one line.

    >>> full = OSError(28, "No space left on device")
    >>> one_line(ValueError("this\nand that")), one_line(full), one_line(KeyError())
    ('this', 'No space left on device', 'KeyError')
    """
    said = str(getattr(error, "strerror", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def name_or_none(name: str, value: Any) -> str | None:
    """Check an argument that is text, or None.

    Args:
        name: of the argument.
        value: what was given.

    Returns:
        The text, or None.

    Raises:
        LipboundError: anything else, blank text among it.
    """
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise LipboundError(f"{name} is {shown(value)}; give its name, or leave it out")


def sample_count(samples: Any, error: type[LipboundError] = LipboundError) -> int | None:
    """Check the number of samples that is wanted.

    Args:
        samples: a whole number of at least 1, or "all".
        error: the type that is raised for anything else.

    Returns:
        The number, or None for "all".

    >>> sample_count("all"), sample_count(8)
    (None, 8)
    """
    if isinstance(samples, str) and samples.strip().lower() == "all":
        return None
    try:
        return whole("samples", samples, least=1, error=error)
    except error as wrong:
        raise error(f"{wrong}, or 'all'") from wrong


def adapter_name(value: Any) -> str | None:
    """Check an argument that names an adapter of a model.

    Args:
        value: a directory or a hub id; "none" or False; or None.

    Returns:
        The name; "none" where there shall be none; None where nothing was said.

    Raises:
        LipboundError: anything else.
    """
    if value is None:
        return None
    name = str(value).strip() if isinstance(value, str | PurePath) else ""
    if value is False or name.lower() == "none":
        return "none"
    if name:
        return str(value)
    what = "give the directory of PEFT, a hub id, or 'none'"
    raise LipboundError(f"adapter is {shown(value)}; {what}")


def indices(name: str, value: Any) -> list[int]:
    """Check an argument that lists whole numbers.

    Args:
        name: of the argument.
        value: one number, several, or text such as "0-3,7"; numbers below zero count from the end.

    Returns:
        The numbers.

    Raises:
        LipboundError: anything else.

    >>> indices("layers", "0-3,7"), indices("layers", 3), indices("layers", range(2))
    ([0, 1, 2, 3, 7], [3], [0, 1])
    """
    try:
        if isinstance(value, str):
            return [i for part in value.split(",") for i in _span(part)]
        several = isinstance(value, Iterable) and not isinstance(value, bytes | dict)
        if several and (_is_array(value) or not hasattr(value, "shape")):
            return [whole(name, i) for i in value]
        return [whole(name, value)]
    except LipboundError as error:
        what = "give numbers from 0, such as 3, or 0-3,7, or a list"
        raise LipboundError(f"{name} is {shown(value)}; {what}") from error


def _span(text: str) -> range:  # the numbers of "3" or "0-3"
    match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if match is None or last < first or (match[2] and first < 0):
        raise LipboundError(text)
    return range(first, last + 1)


def check_layer(att: object, what: str) -> None:
    """Refuse what is no `lipbound.Attention`.

    Args:
        att: what was given.
        what: takes an Attention, in words.

    Raises:
        LipboundError: it is none.
    """
    if reason := getattr(att, "reason", ""):
        raise LipboundError(f"{what} needs a layer in closed form, and this has none: {reason}")
    if not hasattr(att, "only") or not hasattr(att, "projection"):
        raise LipboundError(f"what {what} was given is {shown(att)}; give one layer of lb.capture")


def check_made(given: object, names: Iterable[str], maker: str) -> None:
    """Refuse what is not the Dataset, or a variable of the Dataset, that a function returns.

    Args:
        given: what was given.
        names: of variables and axes that it must have.
        maker: the function, by its full name.

    Raises:
        LipboundError: one of them is missing.
    """
    there = {*getattr(given, "data_vars", ()), *getattr(given, "dims", ())}
    if missing := [name for name in names if name not in there]:
        kind = f"has no {missing[0]!r}" if there else f"is {shown(given)}"
        raise LipboundError(f"what was given {kind}; give what {maker} returns")


def file_path(given: object, example: str) -> Path:
    """Return the path that ``path`` is, with "~" read as a shell reads it.

    Args:
        given: by the user.
        example: the name of such a file.

    Raises:
        LipboundError: it is none.
    """
    if not isinstance(given, str | PathLike) or not str(given).strip():
        raise LipboundError(f"path is {shown(given)}; give the name of a file, as {example!r}")
    return Path(given).expanduser()


def knows_options(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function say which of its options is nearest to one that it does not take."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        known = inspect.signature(function).parameters if kwargs else {}
        unknown = [name for name in kwargs if name not in known]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            name = function.__qualname__.removesuffix(".__init__")
            near = nearest(unknown[0], known)
            raise UnknownNameError(f"{name} has no option {unknown[0]!r}; {near}")
        return function(*args, **kwargs)

    return run


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return the part of a message that names the nearest allowed names, or all of them."""
    allowed = sorted(allowed)
    if close := neighbours(name, allowed):
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    return "allowed are " + ", ".join(allowed)


def neighbours(name: object, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Return up to three known names like a given one, nearest first, whatever their case."""
    if not isinstance(name, str):
        return []
    folded = {one.lower(): one for one in reversed([*known])}  # of two alike the first
    return [folded[c] for c in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=cutoff)]
