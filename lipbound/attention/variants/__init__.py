"""Steps between projections and output besides a mask: one module a variant, found by being here.

A module of this folder defines one subclass of `Variant`, which says what it does to queries, keys
and values, to scores, to the softmax, and to their derivatives.
`lipbound.attention.layer.Attention`, the Jacobians and the streamed products go through these
methods.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from lipbound.attention.variants.base import REGISTERED, Variant

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

VARIANTS = {variant.name: variant.title for variant in sorted(REGISTERED, key=lambda v: v.place)}
"""Names of all variants, and what sentences call them."""


def titles(variants: Iterable[str]) -> str:
    """Return what sentences call variants of these names, in the order of lists."""
    known = dict.fromkeys(variants)
    return listed([VARIANTS[name] for name in VARIANTS if name in known])


def listed(words: Sequence[str]) -> str:
    """Return titles of variants one after the other.

    >>> listed(["capped scores", "sinks"]), listed(["rotation", "capped scores", "sinks"])
    ('capped scores and sinks', 'rotation, capped scores, sinks')
    """
    return (" and " if len(words) < 3 else ", ").join(words)


WITH_TOKEN_NORMS = tuple(name for name in VARIANTS if name not in ("cross", "gate"))
"""Names of those that norms which tell tokens apart cover."""
LINEAR_VALUES = tuple(name for name in WITH_TOKEN_NORMS if name != "value_norm")
"""Names of those under which outputs are averages of projections of the layer's own tokens."""

__all__ = [
    "LINEAR_VALUES",
    "REGISTERED",
    "VARIANTS",
    "WITH_TOKEN_NORMS",
    "Variant",
    "listed",
    "titles",
]
