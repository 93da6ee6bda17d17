"""Attention and MLP sublayers of a transformer, and how far their Jacobians change around an input."""
