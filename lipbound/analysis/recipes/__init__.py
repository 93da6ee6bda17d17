"""Figures and claims of the papers, each from one command: ``lipbound reproduce NAME``."""

from lipbound.analysis.recipes import castin2024, lipbound2026, yudin2025  # noqa: F401  (importing a paper registers its recipes)
from lipbound.analysis.recipes.registry import RECIPES, Recipe, Setting, recipe

__all__ = ["RECIPES", "Recipe", "Setting", "recipe"]
