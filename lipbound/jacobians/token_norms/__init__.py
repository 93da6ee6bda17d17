"""Norms of attention Jacobians in which tokens are told apart: every token moves a little, or one
token a lot."""
