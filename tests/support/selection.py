"""Which combinations of parameters `make test` runs of a test that has many."""

import pytest


def combinations_left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests marked ``each_value``: all but so many that every value of every parameter is among
    those kept; what is slow anyway keeps no value.

    ``each_value(kind=HARD)`` keeps these values of the parameter ``kind`` alone.
    """
    tests: dict[str, list[pytest.Function]] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("each_value")
        if (
            not isinstance(item, pytest.Function)
            or marker is None
            or item.get_closest_marker("slow")
        ):
            continue
        if all(item.callspec.params[name] in values for name, values in marker.kwargs.items()):
            tests.setdefault(f"{item.path}::{item.originalname}", []).append(item)
        else:
            left_out.append(item)
    return left_out + [item for cases in tests.values() for item in _not_needed(cases)]


def _not_needed(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Greedily: next comes what has most values that are not covered yet."""
    values = {
        case: {(name, repr(value)) for name, value in case.callspec.params.items()}
        for case in cases
    }
    left, missing = list(cases), set().union(*values.values())
    while missing:
        case = max(left, key=lambda c: len(values[c] & missing))
        left.remove(case)
        missing -= values[case]
    return left
