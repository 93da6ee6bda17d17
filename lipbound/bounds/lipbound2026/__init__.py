"""Our own bounds at a point."""
