"""Norms of attention Jacobians in which tokens are told apart."""
