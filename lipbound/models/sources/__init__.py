"""Kinds of checkpoints, and what is done to their weights while they are loaded."""
