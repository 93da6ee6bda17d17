"""The errors users meet: each message is one sentence saying what was given, what is allowed and
what to try. And the checks of arguments."""

import difflib
import math
import operator
import re
import warnings
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr


class Notice(UserWarning):
    """Something is not as it was asked for, and the work goes on; the command line prints it as a
    note."""


def tell(message: str) -> None:
    """Warn with a `Notice`; a run keeps the same sentence in its attribute ``notes``."""
    warnings.warn(message, Notice, stacklevel=3)


class LipboundError(ValueError):
    """Base of every error that bad input can cause; the command line prints it and exits with
    status 2."""


class AttentionError(LipboundError):
    """The tensors handed to `Attention` do not form an attention layer."""


class CaptureError(LipboundError):
    """A model's attention could not be captured, or the capture does not reproduce the model."""


class DifferentPositionsError(CaptureError):
    """The samples of a batch have different positions, so that they must be captured one by one."""


class CheckpointError(LipboundError):
    """A checkpoint could not be found or loaded."""


class InputsError(LipboundError):
    """The data cannot be turned into inputs of the model."""


class StoreError(LipboundError):
    """A run cannot be written to, or read from, where it was asked for.

    Attributes:
        dataset: the finished run that could not be saved, where there is one.
    """

    dataset: "xr.Dataset | None" = None


class AlteredRunError(StoreError):
    """A stored run is not as it was computed: a file is damaged or missing, or numbers or settings
    were changed."""


class DamagedRunWarning(UserWarning):
    """The same, of a run that was loaded nevertheless."""


class RangeError(LipboundError):
    """Numbers leave the range of the dtype on the way."""


class UnknownNameError(LipboundError):
    """A name that is not in a registry."""


def is_number(value: object) -> bool:
    """Whether a value is a real number, as Python, numpy or a tensor of one element writes it, and
    not NaN."""
    try:
        return not isinstance(value, str | bytes) and not math.isnan(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def shown(value: object) -> str:
    """A value as a message quotes it: short ones in full, others by their type.

    >>> shown("8"), shown([1, 2]), shown(object())
    ("'8'", '[1, 2]', 'of type object')
    """
    plain = value is None or isinstance(
        value, bool | int | float | complex | str | bytes | list | tuple | set | dict | range
    )
    text = " ".join(repr(value).split()) if plain else ""
    if plain and len(text) <= 80:
        return text
    if isinstance(value, str):
        return text[:79] + "...'"
    if hasattr(value, "shape") and not tuple(value.shape) and not isinstance(value, type):
        return " ".join(str(value).split())[:80]
    return f"of type {type(value).__name__}"


def _has_axes(value: object) -> bool:
    """Whether it is an array, of numbers rather than one number."""
    return bool(getattr(value, "shape", False))


def whole(
    name: str, value: Any, *, least: int | None = None, error: type[LipboundError] = LipboundError
) -> int:
    """An argument that is a whole number, of Python, numpy or torch.

    Args:
        name: of the argument. value: what was given.
        least: the smallest that is allowed.
        error: the type to raise.

    Raises:
        LipboundError: anything else: text, fractions, True and False among it.

    >>> whole("samples", 8, least=1)
    8
    """
    try:
        dtype = str(getattr(value, "dtype", ""))
        number = (
            None
            if isinstance(value, bool) or "bool" in dtype or _has_axes(value)
            else operator.index(value)
        )
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None or (least is not None and number < least):
        at_least = "" if least is None else f", at least {least}"
        raise error(f"{name} is {shown(value)}; it must be a whole number{at_least}")
    return number


def real(
    name: str,
    value: Any,
    must: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    error: type[LipboundError] = LipboundError,
) -> float:
    """An argument that is a finite number strictly between two others; ``must`` says what it must
    be.

    >>> real("tol", 0.001, "between 0 and 1", above=0, below=1)
    0.001
    """
    if (
        isinstance(value, bool)
        or _has_axes(value)
        or not is_number(value)
        or not (above < float(value) < below)
    ):
        raise error(f"{name} is {shown(value)}; it must be {must}")
    return float(value)


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """An argument that is one of some names; raises UnknownNameError with the nearest one
    otherwise."""
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise UnknownNameError(f"unknown {name} {shown(value)}; {nearest(value, allowed)}")
    return value


def flag(name: str, value: Any) -> bool:
    """An argument that is True or False."""
    if _has_axes(value) or not (
        isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    ):
        raise LipboundError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def one_line(error: BaseException) -> str:
    r"""The message of an error of the system or of another package, on one line.

    >>> full = OSError(28, "No space left on device")
    >>> one_line(ValueError("this\nand that")), one_line(full), one_line(KeyError())
    ('this', 'No space left on device', 'KeyError')
    """
    said = str(getattr(error, "strerror", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__


def name_or_none(name: str, value: Any) -> str | None:
    """An argument that is text, or None."""
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise LipboundError(f"{name} is {shown(value)}; give its name, or leave it out")


def sample_count(samples: Any, error: type[LipboundError] = LipboundError) -> int | None:
    """The number of samples that is wanted: a whole number of at least 1, or None for "all".

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
    """An argument that names an adapter of a model, or says that there is none ("none", False), or
    nothing (None)."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "none"):
        return "none"
    if value is None or (isinstance(value, str | PurePath) and str(value).strip()):
        return None if value is None else str(value)
    raise LipboundError(
        f"adapter is {shown(value)}; give the directory that PEFT wrote, its hub id, or 'none' "
        "for the weights without one"
    )


def indices(name: str, value: Any) -> list[int]:
    """An argument that lists whole numbers: one, several, or text such as "0-3,7"; numbers below
    zero count from the end.

    >>> indices("layers", "0-3,7"), indices("layers", 3), indices("layers", range(2))
    ([0, 1, 2, 3, 7], [3], [0, 1])
    """
    try:
        if isinstance(value, str):
            return [i for part in value.split(",") for i in _span(part)]
        return (
            [whole(name, value)]
            if not isinstance(value, Iterable) or not _countable(value)
            else [whole(name, i) for i in value]
        )
    except LipboundError as error:
        raise LipboundError(
            f"{name} is {shown(value)}; give numbers from 0, such as 3, or 0-3,7, or a list of them"
        ) from error


def _countable(value: Any) -> bool:
    return not isinstance(value, bytes | dict) and (not hasattr(value, "shape") or _has_axes(value))


def _span(part: str) -> range:
    """ "3" or "0-3"."""
    match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
    if match is None:
        raise LipboundError(part)
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first or (match[2] is not None and first < 0):
        raise LipboundError(part)
    return range(first, last + 1)


def check_layer(att: object, what: str) -> None:
    """Raise LipboundError for what is no `lipbound.Attention`; ``what`` takes one."""
    if not hasattr(att, "only") or not hasattr(att, "scoring"):
        raise LipboundError(
            f"{what} was given {shown(att)}; it takes one Attention, such as a layer of "
            "lipbound.capture"
        )


def nearest(name: object, allowed: Iterable[str]) -> str:
    """The part of a message that names the closest allowed names, whatever their case, or all of
    them where none is close."""
    allowed = sorted(allowed)
    close = neighbours(name, allowed)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "allowed are " + ", ".join(allowed)


def neighbours(name: object, known: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """Up to three names that are like a given one, the likest first, whatever their case."""
    if not isinstance(name, str):
        return []
    folded: dict[str, str] = {}
    for one in known:
        folded.setdefault(one.lower(), one)
    return [folded[c] for c in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=cutoff)]
