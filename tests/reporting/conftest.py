"""The run that most pages of this folder show."""

import pytest
import xarray as xr


@pytest.fixture(scope="module")
def ds(gpt2_run: xr.Dataset) -> xr.Dataset:
    """A copy of the run of GPT-2; files that show another one have a fixture of their own."""
    return gpt2_run.copy(deep=True)
