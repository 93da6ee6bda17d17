"""A run, or several, as one self-contained page."""
