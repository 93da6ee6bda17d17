"""What transformers and its neighbours say while they work: silenced, or cut to one line."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
from datasets.utils import logging as datasets_logging
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils import logging as transformers_logging

VERBOSE = "LIPBOUND_VERBOSE"
"""The environment variable that lets other libraries speak, where it is set to anything."""


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers, datasets and the hub print neither progress bars nor warnings,
    unless `VERBOSE` is set."""
    if os.environ.get(VERBOSE):
        yield
        return
    levels = transformers_logging.get_verbosity(), datasets_logging.get_verbosity()
    shown = transformers_logging.is_progress_bar_enabled(), datasets.is_progress_bar_enabled()
    retries = logging.getLogger("huggingface_hub")
    level = retries.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        datasets_logging.set_verbosity(logging.CRITICAL)
        datasets.disable_progress_bars()
        retries.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            transformers_logging.set_verbosity(levels[0])
            datasets_logging.set_verbosity(levels[1])
            retries.setLevel(level)
            if shown[0]:
                transformers_logging.enable_progress_bar()
            if shown[1]:
                datasets.enable_progress_bars()


@contextmanager
def bars() -> Iterator[None]:
    """Context in which downloads show their bars on terminals only, or where `VERBOSE` is set."""
    if os.environ.get(VERBOSE) or sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def first_line(error: BaseException) -> str:
    """The message of another library's error in one line of at most 300 characters, without codes
    for terminals."""
    said = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(error)).strip()
    return said.splitlines()[0][:300] if said else type(error).__name__


def cause(error: BaseException) -> str:
    """`first_line` of the error that another one was raised from, at the bottom."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return first_line(error)
