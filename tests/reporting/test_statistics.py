"""Bootstrap intervals over samples, against bootstraps written out in loops."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from support.runs import made_up

from lipbound import tables
from lipbound.reporting.statistics import LEVEL, interval, interval_words

REDUCTIONS: dict[str | float, Callable] = {
    "geomean": lambda a: np.exp(np.log(a).mean()),
    "mean": np.mean,
    "max": np.max,
    "median": np.median,
    0.25: lambda a: np.quantile(a, 0.25),
}


def drawn(samples: int, spread: float = 0.5) -> xr.DataArray:
    values = np.exp(np.random.default_rng(3).normal(scale=spread, size=(samples, 3, 4)))
    return xr.DataArray(values, dims=("sample", "layer", "head"))


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("dims", [("sample",), ("sample", "head"), ("sample", "layer", "head")])
def test_intervals_are_those_of_all_resamples(how: str | float, dims: tuple[str, ...]) -> None:
    """Of four samples there are 256 resamples: the ends found from some thousands of draws lie
    between percentiles of them all a little further in and out."""
    values = drawn(4)
    kept = [dim for dim in values.dims if dim not in dims]
    rows = values.transpose(*kept, "sample", ...).values.reshape(*(3, 4)[: len(kept)], 4, -1)
    every = [
        [REDUCTIONS[how](place[list(picked)]) for picked in itertools.product(range(4), repeat=4)]
        for place in rows.reshape(-1, 4, rows.shape[-1])
    ]
    lower, upper = (end.values.ravel() for end in interval(values, how, dims))
    tail, slack = (1 - LEVEL) / 2, 0.0125  # more than three standard errors of 2,000 draws
    for end, low, high in (
        (lower, tail - slack, tail + slack),
        (upper, 1 - tail - slack, 1 - tail + slack),
    ):
        limits = np.quantile(every, [low, high], axis=-1, method="inverted_cdf")
        assert (limits[0] * (1 - 1e-12) <= end).all()
        assert (end <= limits[1] * (1 + 1e-12)).all()
    assert (lower < upper).all()


def test_intervals_cover_what_they_are_of() -> None:
    """Of samples of a known distribution, about as often as they say."""
    rng = np.random.default_rng(0)
    values = xr.DataArray(np.exp(rng.normal(size=(40, 1000))), dims=("sample", "layer"))
    lower, upper = interval(values)
    covered = float(((lower <= 1) & (upper >= 1)).mean())
    assert 0.92 < covered < 0.96


def test_what_has_no_value_is_not_drawn() -> None:
    """Samples without values count for nothing; places without values have no interval."""
    values, more = drawn(4), drawn(6)
    more[:4], more[4:] = values, np.nan
    for found, expected in zip(interval(more), interval(values), strict=True):
        np.testing.assert_array_equal(found, expected)
    more[:, 1, 2] = np.nan
    holes = [end.isnull() for end in interval(more, "median")]
    assert all(int(hole.sum()) == 1 and bool(hole[1, 2]) for hole in holes)
    more[0, 0, 0] = np.inf
    lower, upper = interval(more)
    assert np.isfinite(lower[0, 0])
    assert np.isposinf(upper[0, 0])


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
    assert interval_words(1) == "one sample: no interval over samples"
    one = ds.isel(sample=[1])
    for by in tables.ROWS:
        text = tables.render(one, by=by)
        assert interval_words(1) in text
        assert tables.LIKELY not in text
        assert interval_words(2) in tables.render(ds, by=by)
        assert np.isnan(tables.table_of(one, by).numbers["interval_lower"]).all()
    assert "too narrow" in interval_words(19)
    assert "too narrow" not in interval_words(20)


def test_intervals_are_the_same_every_time_and_in_every_format() -> None:
    ds = made_up()
    numbers = tables.table_of(ds).numbers
    assert numbers.equals(tables.table_of(ds).numbers)
    row = numbers.loc["lipbound"]
    assert row["sample_min"] <= row["interval_lower"] < row["geomean"] < row["interval_upper"]
    rows = tables.table_of(ds).data()["rows"]
    assert rows[-2]["interval_upper"] == row["interval_upper"]
    assert "interval_lower" in tables.render(ds, "csv")
    for form in ("text", "markdown"):
        assert "95% interval" in tables.render(ds, form)
    assert r"95\% interval" in tables.render(ds, "latex", width="page")
