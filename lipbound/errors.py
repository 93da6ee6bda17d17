"""The errors users meet: each message is one sentence saying what was given, what is allowed and what to try."""

import difflib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr


class LipboundError(ValueError):
    """Base of every error that bad input can cause; the command line prints it and exits with status 2."""


class AttentionError(LipboundError):
    """The tensors handed to `Attention` do not form an attention layer."""


class CaptureError(LipboundError):
    """A model's attention could not be captured, or the capture does not reproduce the model."""


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
    """A stored run is not as it was computed: a file is damaged or missing, or numbers or settings were changed."""


class DamagedRunWarning(UserWarning):
    """The same, of a run that was loaded nevertheless."""


class RangeError(LipboundError):
    """Numbers leave the range of the dtype on the way."""


class UnknownNameError(LipboundError):
    """A name that is not in a registry."""


def is_number(value: object) -> bool:
    """Whether a value is a real number, as Python, numpy or a tensor of one element writes it, and not NaN."""
    try:
        return not isinstance(value, str | bytes) and not math.isnan(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return False


def nearest(name: object, allowed: Iterable[str]) -> str:
    """The part of a message that names the closest allowed names, or all of them where none is close."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5) if isinstance(name, str) else []
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "allowed are " + ", ".join(allowed)
