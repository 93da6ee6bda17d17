"""What all our bounds share in the registry."""

from functools import partial
from typing import Any

from lipbound.bounds import conditions
from lipbound.bounds.ours import BIBTEX
from lipbound.bounds.ours.block_norms import longest
from lipbound.bounds.registry import bound
from lipbound.bounds.whole_layer_rules import with_folded

PARTS: dict[str, Any] = {"condition": conditions.always, "layer": with_folded, "longest": longest}
"""Of every `Formula` of ours, for any kind of heads."""
our_bound = partial(bound, bibtex=BIBTEX, assumptions="any biases, any mask", **PARTS)
"""Decorator of our bounds."""
