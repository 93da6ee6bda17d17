"""Names of the variants of attention: steps between projections and output, besides a mask."""

from collections.abc import Iterable

VARIANTS = {
    "rotation": "rotary position embeddings",
    "qk_norm": "normalised queries and keys",
    "cap": "capped scores",
    "sinks": "sink logits",
    "value_norm": "normalised values",
    "cross": "cross-attention",
    "gate": "gated outputs",
}
"""Names of all variants, and what sentences call them."""
WITH_TOKEN_NORMS = tuple(name for name in VARIANTS if name not in ("cross", "gate"))
"""Names of those that norms which tell tokens apart cover."""
LINEAR_VALUES = tuple(name for name in WITH_TOKEN_NORMS if name != "value_norm")
"""Names of those under which outputs are averages of projections of the layer's own tokens."""


def titles(variants: Iterable[str]) -> str:
    """Return what sentences call variants of these names, in the order of `VARIANTS`.

    >>> titles(["sinks", "cap"]), titles(["cap", "sinks", "gate"])
    ('capped scores and sink logits', 'capped scores, sink logits, gated outputs')
    """
    named = set(variants)
    words = [VARIANTS[name] for name in VARIANTS if name in named]
    return (" and " if len(words) < 3 else ", ").join(words)
