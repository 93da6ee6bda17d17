"""Questions beyond one run."""
