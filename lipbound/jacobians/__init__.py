"""Closed-form Jacobians of attention and their exact norms."""
