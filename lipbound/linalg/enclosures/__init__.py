"""Norms between two bounds that hold for the given numbers, every rounding included."""
