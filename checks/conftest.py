"""A run whose names are hostile, for pages and LaTeX."""

from pathlib import Path

import pytest
import xarray as xr

import lipbound as lb
from lipbound.runs import store

HOSTILE = (
    "</script><img src=x onerror=window.hacked=1> $\\input{/etc/passwd}$ 50 % #_^~&{} "
    "|\n\x1b[31m @x \u21af"
)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run on disk."""
    path = tmp_path_factory.mktemp("run") / "gpt2.zarr"
    lb.compare("builtin:gpt2", samples=2, max_length=32, progress=False, out=path)
    return path


@pytest.fixture(scope="session")
def ds(run: Path) -> xr.Dataset:
    """The run."""
    return store.load(run)


@pytest.fixture(scope="session")
def hostile(ds: xr.Dataset) -> xr.Dataset:
    """The run with names that try to be markup."""
    other = ds.copy(deep=True)
    for name in (
        "model",
        "data",
        "architecture",
        "command",
        "map_description",
        "preprocessing",
        "device",
    ):
        other.attrs[name] = HOSTILE
    for name in ("yudin", "castin"):
        other[name].attrs["label"] = HOSTILE
    return other


@pytest.fixture(scope="session")
def minilm() -> xr.Dataset:
    """A run with biases, 12 heads and infinite ratios."""
    return lb.compare("builtin:minilm", samples=2, max_length=32, progress=False)
