"""Other libraries: bars and warnings silenced, errors explained, attributes changed for a while."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging import CRITICAL, ERROR, getLogger
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers.utils import logging as transformers_logging

from lipbound.errors import LipboundError

VERBOSE = "LIPBOUND_VERBOSE"
"""Environment variable that lets other libraries speak, where it is set to anything."""
SILENCED = {"transformers": ERROR, "datasets": CRITICAL, "huggingface_hub": CRITICAL}
"""Libraries whose loggers are silenced, and the least level at which they may still speak."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of other libraries, unless `VERBOSE` is set.

    `datasets` is silenced where it is loaded already: it takes long to load, and few runs need it.
    """
    if os.environ.get(VERBOSE):
        yield
        return
    with ExitStack() as afterwards, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SILENCED.keys() & sys.modules.keys():
            logger = getLogger(name)
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(SILENCED[name])
        speakers: tuple[Any, ...] = transformers_logging, sys.modules.get("datasets.utils.logging")
        for speaker in filter(None, speakers):
            if speaker.is_progress_bar_enabled():
                afterwards.callback(speaker.enable_progress_bar)
            speaker.disable_progress_bar()
        yield


@contextmanager
def temporarily(name: str, value: Any, *objects: Any) -> Iterator[None]:
    """Yield while an attribute of objects has another value."""
    before = [(one, getattr(one, name)) for one in objects]
    try:
        for one, _ in before:
            setattr(one, name, value)
        yield
    finally:
        for one, old in before:
            setattr(one, name, old)


def answers(ask: Callable[..., Any], name: str, **options: Any) -> bool:
    """Return whether the hub says something of a name, refusals included.

    Its own clients may wait for minutes.

    Args:
        ask: ``model_info`` or ``dataset_info`` of ``huggingface_hub.HfApi``.
        name: a hub id.
        **options: of ``ask``.
    """
    try:
        ask(name, timeout=15, **options)
    except Exception as error:  # or no connection, in whatever type the HTTP client reports it
        return isinstance(error, HfHubHTTPError | HFValidationError)
    return True


def first_line(error: BaseException) -> str:
    """Return the message of another library's error in one line of at most 300 characters.

    A line that ends in a colon goes on with the next.
    """
    said = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip()
    return re.sub(r":\n\s*", ": ", said).splitlines()[0][:300] if said else type(error).__name__


@contextmanager
def explained(
    kind: type[LipboundError], before: str, after: str = "", why: Callable[..., str] = first_line
) -> Iterator[None]:
    """Raise an error of ours in place of whatever other libraries raise.

    Args:
        kind: of the error. Errors of ours pass unchanged.
        before: its message up to the reason.
        after: its message behind the reason.
        why: makes the reason of the error.

    Yields:
        Nothing.

    Raises:
        LipboundError: of that kind, where another library raises anything.
    """
    try:
        yield
    except LipboundError:
        raise
    except Exception as error:  # broken files raise a zoo of types, down to those of single parsers
        raise kind(f"{before}{why(error)}{after}") from error


def cause(error: BaseException) -> str:
    """Return `first_line` of the error at the bottom, which the others were raised from."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return first_line(error)
