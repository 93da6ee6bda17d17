"""Upper bounds on the local Lipschitz constant of attention heads: one file per paper, one registry."""

from lipbound.bounds import castin2024, kim2021, ours, ours_gram, specformer2024, yudin2025  # noqa: F401  (importing a paper registers its bounds)
from lipbound.bounds.auditing import audit
from lipbound.bounds.ball import over_ball
from lipbound.bounds.citations import BIBTEX
from lipbound.bounds.multihead import whole_layer
from lipbound.bounds.normalised import after_norm
from lipbound.bounds.registry import Bound, bound, evaluate, get, names, resolve

__all__ = ["BIBTEX", "Bound", "after_norm", "audit", "bound", "evaluate", "get", "names", "over_ball", "resolve", "whole_layer"]
