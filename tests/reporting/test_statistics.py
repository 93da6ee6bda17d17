"""Intervals over samples, against SciPy, and in simulations of what they are to cover."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats
from support.runs import made_up

from lipbound import tables
from lipbound.reporting.statistics import (
    FEW,
    LEVEL,
    LIKELY,
    RANGE,
    interval,
    reduce_samples,
    sample_span,
    spread_title,
)


def drawn(samples: int, spread: float = 0.5) -> xr.DataArray:
    values = np.exp(np.random.default_rng(3).normal(scale=spread, size=(samples, 3, 4)))
    return xr.DataArray(values, dims=("sample", "layer", "head"))


@pytest.mark.parametrize("dims", [("sample",), ("sample", "head"), ("sample", "layer", "head")])
def test_intervals_are_students(dims: tuple[str, ...]) -> None:
    """Those of SciPy for the mean logarithms of single samples."""
    values = drawn(6)
    kept = [dim for dim in values.dims if dim not in dims]
    single = np.log(values).mean([dim for dim in dims if dim != "sample"])
    wanted = stats.ttest_1samp(single.transpose("sample", ...).values, 0).confidence_interval(LEVEL)
    for found, end in zip(interval(values, "geomean", dims), wanted, strict=True):
        assert found.dims == tuple(kept)
        np.testing.assert_allclose(found, np.exp(end), rtol=1e-12)


def test_samples_of_fewer_heads_weigh_less() -> None:
    """Every value weighs alike in the mean, and in its error: that of a ratio of sums."""
    values = drawn(7)
    values[0, 0, 1:] = values[3, 2] = np.nan
    logs = np.log(values.values.reshape(7, -1))
    totals, counts = np.nansum(logs, 1), (~np.isnan(logs)).sum(1)
    mean = totals.sum() / counts.sum()
    error = np.sqrt(7 / 6 * ((totals - mean * counts) ** 2).sum()) / counts.sum()
    reach = stats.t(6).ppf((1 + LEVEL) / 2) * error
    for found, sign in zip(interval(values, "geomean", values.dims), (-1, 1), strict=True):
        assert float(found) == pytest.approx(np.exp(mean + sign * reach), rel=1e-12)


@pytest.mark.parametrize("samples", [5, 8, 20, 50])
@pytest.mark.parametrize("shape", ["normal", "heavy", "heads"])
def test_intervals_cover_what_they_are_of(samples: int, shape: str) -> None:
    """Geometric means of 4,000 sets of samples of a known distribution: in 93 % of them or more."""
    rng, dims = np.random.default_rng(samples), ("sample", "layer")
    logs = {
        "normal": lambda: rng.normal(size=(samples, 4000)),
        "heavy": lambda: rng.standard_t(4, size=(samples, 4000)),
        # what all heads of a sample share, and what each has of its own
        "heads": lambda: rng.normal(size=(samples, 4000, 1)) + rng.normal(size=(samples, 4000, 3)),
    }[shape]()
    values = xr.DataArray(np.exp(0.5 * logs), dims=[*dims, "head"][: logs.ndim])
    lower, upper = interval(values, "geomean", [dim for dim in values.dims if dim != "layer"])
    covered = float(((lower <= 1) & (upper >= 1)).mean())
    assert 0.93 <= covered <= 0.97


def test_few_samples_have_their_range_and_no_interval() -> None:
    """Neither have other reductions than geometric means."""
    assert FEW == 5
    values = drawn(4)
    assert all(bool(end.isnull().all()) for end in interval(values))
    for how in ("max", "mean", 0.5):
        assert all(bool(end.isnull().all()) for end in interval(drawn(9), how))
    for how, many in (("geomean", 4), ("median", 9)):
        values = drawn(many)
        single = reduce_samples(values, how, ["head"])
        lower, upper = sample_span(values, how, ("sample", "head"))
        np.testing.assert_array_equal(lower, single.min("sample"))
        np.testing.assert_array_equal(upper, single.max("sample"))
        assert spread_title(many, how) == RANGE
    assert spread_title(5) == LIKELY
    values = drawn(5)
    for found, expected in zip(sample_span(values), interval(values), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_has_no_value_does_not_count() -> None:
    """Samples without values count for nothing; places without values have no interval."""
    values, more = drawn(6), drawn(8)
    more[:6], more[6:] = values, np.nan
    for found, expected in zip(interval(more), interval(values), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14)
    more[:, 1, 2] = np.nan
    more[:4, 0, 1] = np.nan  # two are left
    more[0, 2, 0], more[0, 2, 1] = np.inf, 0.0
    for found in interval(more):
        assert np.argwhere(found.isnull().values).tolist() == [[0, 1], [1, 2], [2, 0], [2, 1]]


def test_both_ends_of_a_geometric_mean_are_of_the_same_heads() -> None:
    """A head whose norm is known from above alone has no ratio to either end."""
    ds = made_up()
    assert float(ds["exact"][0, 0, 0]) == 0
    known = ds["exact"].values > 0
    ds["exact_upper"][0, 0, 0], ds["lipbound"][0, 0, 0] = 1e-6, 1e6
    row = tables.summary(ds).loc["lipbound"]
    for end, column in (("exact", "geomean"), ("exact_upper", "geomean_lower")):
        ratios = ds["lipbound"].values[known] / ds[end].values[known]
        assert row[column] == pytest.approx(np.exp(np.log(ratios).mean()))
    assert row["geomean_lower"] < row["geomean"]


def test_one_sample_has_no_interval_and_that_is_said() -> None:
    ds = made_up()
    assert all(bool(end.isnull().all()) for end in interval(ds["exact"].isel(sample=[1])))
    one = ds.isel(sample=[1])
    for by in tables.BY:
        made = tables.table_of(one, by)
        text, of_two = tables.WRITERS["text"](made), tables.render(ds, by=by)
        assert "one sample: no interval over samples" in text
        assert LIKELY not in text
        assert RANGE not in text
        assert f"{RANGE}: smallest to largest" in of_two
        assert LIKELY not in of_two
        assert np.isnan(made.numbers["interval_lower"]).all()
