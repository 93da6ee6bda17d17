"""Norms of matrices and of linear operators; knows no attention."""
