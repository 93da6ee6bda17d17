"""Figures and claims of the papers, each from one command: ``lipbound reproduce NAME``."""

from lipbound.recipes import castin, ours, yudin  # noqa: F401  (they enter their recipes in the table)
from lipbound.recipes.registry import RECIPES, Recipe, Setting, recipe

__all__ = ["RECIPES", "Recipe", "Setting", "recipe"]
