"""Tests that need more than the lowest versions that are admitted."""

from collections.abc import Iterable

import pytest
import torch
import transformers as tf
from packaging.version import Version

NEWER = "5.24"
"""The transformers in which what 5.0 lacks is tested; the versions between are not."""


def newer_transformers(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where transformers is older than `NEWER`.

    Args:
        reason: what it lacks, or does otherwise.
    """
    said = f"transformers {tf.__version__}: {reason}"
    return pytest.mark.skipif(Version(tf.__version__) < Version(NEWER), reason=said)


def newer_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where torch is older.

    Args:
        version: that is needed.
        reason: what older ones lack.
    """
    said = f"torch {torch.__version__}: {reason}"
    return pytest.mark.skipif(Version(torch.__version__) < Version(version), reason=said)


def marked(cases: Iterable[str], lacking: dict[str, str]) -> list[object]:
    """Return the parameters of a test, those among them marked that an older transformers lacks.

    Args:
        cases: all of them.
        lacking: the reason by case.
    """
    return [
        pytest.param(case, marks=newer_transformers(lacking[case])) if case in lacking else case
        for case in cases
    ]
