"""A short run that several files interrupt, repeat and compare."""

import xarray as xr

TEXTS = ["the ferry is in a clock", "the keeper and the lighthouse", "a island of the ferry", "the lighthouse"]
OPTIONS = {"max_length": 12, "progress": False, "memory": 1, "bounds": ["yudin", "lipbound"]}  # one sample at a time


def identical(a: xr.Dataset, b: xr.Dataset) -> bool:
    """Everything but date and command."""
    a, b = a.copy(), b.copy()
    for ds in (a, b):
        ds.attrs = {key: value for key, value in ds.attrs.items() if key not in ("date", "command", "settings_checksum")}
    return a.identical(b)
