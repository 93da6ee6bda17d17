"""Entries of our own bounds in the registry, with the facts that all of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lipbound.bounds import conditions
from lipbound.bounds.ours import BIBTEX
from lipbound.bounds.ours.block_norms import longest
from lipbound.bounds.registry import bound
from lipbound.bounds.whole_layer_rules import with_folded

if TYPE_CHECKING:
    from collections.abc import Callable

    from lipbound.bounds.statement import Bound, Function

PARTS: dict[str, Any] = {"condition": conditions.always, "layer": with_folded, "longest": longest}
"""Facts that are the same for every formula of our bounds, whatever the heads have."""


def our_bound(name: str, **facts: Any) -> Callable[[Function], Bound]:
    """Decorator: `bound` with what our bounds share."""
    return bound(name, bibtex=BIBTEX, assumptions="any biases, any mask", **PARTS, **facts)
