"""Published bounds: one file per paper."""
