"""A run as tables, figures, a page, citations."""
