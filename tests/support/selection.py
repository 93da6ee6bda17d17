"""Which combinations of parameters `make test` runs of a test that has many."""

from collections import Counter
from itertools import combinations

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
    """Greedily: next comes what has most values that are not covered yet, then what has been seen
    least, one by one and in pairs."""
    values = {
        case: {(name, repr(value)) for name, value in case.callspec.params.items()}
        for case in cases
    }
    pairs = {case: set(combinations(sorted(values[case]), 2)) for case in cases}
    seen = Counter[object]()
    left, missing = list(cases), set().union(*values.values())
    while missing:
        case = min(
            left,
            key=lambda c: (
                -len(values[c] & missing),
                sum(seen[value] for value in values[c]),
                sum(seen[pair] for pair in pairs[c]),
            ),
        )
        left.remove(case)
        missing -= values[case]
        seen.update(values[case] | pairs[case])
    return left
