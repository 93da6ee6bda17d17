"""Upper bounds on the local Lipschitz constant of attention heads: one file per paper, one registry."""

from lipbound.bounds import castin2024, kim2021, specformer2024, yudin2025  # noqa: F401  (importing a paper registers its bounds)
from lipbound.bounds.after_layer_norm import after_norm
from lipbound.bounds.audit import audit
from lipbound.bounds.ball.over_ball import over_ball
from lipbound.bounds.citations import BIBTEX
from lipbound.bounds.lipbound2026 import gram, plain  # noqa: F401
from lipbound.bounds.registry import Bound, bound, evaluate, get, names, resolve
from lipbound.bounds.whole_layer import whole_layer

__all__ = ["BIBTEX", "Bound", "after_norm", "audit", "bound", "evaluate", "get", "names", "over_ball", "resolve", "whole_layer"]
