"""Output for programs: JSON with full precision."""

import json
import math
from typing import Any

import typer


def echo_json(value: Any) -> None:
    """Print a value as JSON; ``"inf"`` and ``"-inf"`` stand for infinite numbers, null for missing
    ones, which JSON has no numbers for."""
    typer.echo(json.dumps(plain_data(value), allow_nan=False, indent=2))


def plain_data(value: Any) -> Any:
    """Dictionaries, lists, text and numbers; numbers of numpy as Python's own.

    >>> plain_data({"a": (1.5, float("nan"), float("inf"))})
    {'a': [1.5, None, 'inf']}
    """
    if isinstance(value, dict):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
