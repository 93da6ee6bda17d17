"""Kinds of checkpoints: one class a kind, each of which says what it answers to and how it is
loaded."""
