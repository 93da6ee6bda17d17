"""Figures and claims of the papers, each from one command: ``lipbound reproduce NAME``."""

from lipbound.analysis.recipes.registry import RECIPES, Recipe, Setting, recipe

__all__ = ["RECIPES", "Recipe", "Setting", "recipe"]
