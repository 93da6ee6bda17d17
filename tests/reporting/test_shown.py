"""What captions, tables and paragraphs say is counted from what is shown: parts of runs, edited
runs, enclosures that did not close, names."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from support.models import AFFINE, build, inputs_for
from support.runs import made_up

import lipbound as lb
from lipbound import plots, tables
from lipbound.reporting import tables as citations
from lipbound.runs.checksums import sealed
from lipbound.schema import RunInfo


@pytest.fixture(scope="module")
def ds():
    return made_up()


def said(ds):
    """Everything that says what a run is."""
    return {
        "table": tables.caption(ds),
        "figure": plots.caption(ds),
        "methods": citations.methods(ds, "text"),
        "latex": citations.methods(ds),
    }


def test_what_did_not_close_is_not_called_enclosed_to_the_tolerance(gpt2_run):
    model = build(AFFINE["gpt2"])
    run = lb.compare(model, inputs_for(model), tol=1e-15, bounds=["yudin"], progress=False)
    width = float((run["exact_upper"] / run["exact"] - 1).max())
    assert width > 1e-14  # rounding alone
    for name, text in said(run).items():
        assert "enclosed to 1e-15" not in text
        assert "factor 1 above" not in text, name
    stated = float(tables.caption(run).partition("enclosed to ")[2].partition(" ")[0])
    assert width <= stated <= 1.2 * width
    assert "(1e-15 was asked for)" in citations.methods(run, "text")
    for part in (gpt2_run, gpt2_run.isel(sample=[0])):
        assert "enclosed to 0.001 with failure" in tables.caption(part)


def table(**options):
    return lambda ds: tables.render(ds, **options)


def paragraph(ds):
    return citations.methods(ds, "text")


def opened(ds):
    """One norm without a finite upper end, as it was computed."""
    found = ds.copy(deep=True)
    found["exact_upper"][0, 1, 1] = np.inf
    return sealed(found, RunInfo.of(ds))


def halved(ds):
    """One sample with bounds alone."""
    found = ds.copy(deep=True)
    found["exact"][1] = np.nan
    return found


def raised(ds):
    """Exact norms above all bounds."""
    with xr.set_options(keep_attrs=True):
        return ds.assign(exact=ds["exact"] * 1e9)


def closed(ds):
    return ds.isel(layer=[0, 2])


def alone(ds):
    return ds[["exact", "exact_upper"]].assign_attrs(bounds=[])


def same(ds):
    return ds


WIDE = "enclosed to 0.001 with failure probability 1e-6, except 1 of 24, enclosed to 0.0041"
VALUES = table(by="layer", values="value")
MODELS = {
    "builtin:minilm": "all-MiniLM-L6-v2",
    "/home/me/checkpoints/alice": "alice",
    "/c/hub/models--a--all-MiniLM-L6-v2/snapshots/0a1b": "a/all-MiniLM-L6-v2",
    "google/vit-base-patch16-224": "google/vit-base-patch16-224",
    "C:\\models\\bert": "bert",
    "builtin:gpt2": "A small GPT-2, trained on Alice's Adventures in Wonderland",
    "builtin:none": "builtin:none",
}


@pytest.mark.parametrize(
    ("shown", "say", "words", "others"),
    [
        *((same, say, WIDE, "without a finite upper end") for say in (tables.caption, paragraph)),
        (closed, paragraph, "enclosed to 0.001", "except"),
        (opened, tables.caption, "except 1 of 24, some without a finite upper end", "0.0041"),
        (halved, paragraph, "geometric means over layers and heads", "over samples, layers"),
        (halved, paragraph, "with exact constants on 1 of them", "?"),
        (halved, VALUES, "exact norms are of 1 sample, bounds of all 2", "?"),
        (halved, VALUES, "geometric mean over samples and heads: exact norm, bound;", "?"),
        *((same, table(by=by), "bound / exact", "edited") for by in ("layer", "head")),
        *((alone, table(by=by), "exact norm", "bound / exact") for by in ("layer", "head")),
        (raised, table(), "\u2021 Yudin 2025, Thm 3 (yudin)", "report this run"),
        (raised, paragraph, "assumptions held, but the run was edited", "report this run"),
        *(
            (lambda ds, model=model: ds.assign_attrs(model=model), tables.caption, f"{name} (", "?")
            for model, name in MODELS.items()
        ),
    ],
)
def test_what_is_said(ds, shown, say, words, others):
    text = say(shown(ds))
    assert words in text
    assert others not in text


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"sample": [0]}, ["1 of 2 samples of at most 32 tokens", "3 layers x 4 heads"]),
        ({"sample": 1}, ["1 of 2 samples of at most 30 tokens"]),
        ({"layer": [0]}, ["layer 0 of 3 counted from 0, 4 heads;"]),
        ({"layer": 2}, ["layer 2 of 3 counted from 0, 4 heads;"]),
        ({"layer": [0, 2]}, ["layers 0 and 2 of 3 counted from 0, 4 heads each"]),
        ({"head": [1, 3]}, ["3 layers, heads 1 and 3 of 4 counted from 0"]),
        ({"head": 3}, ["3 layers, head 3 of 4 counted from 0"]),
    ],
)
def test_parts_are_called_what_they_are(ds, part, words):
    shown = ds.isel(part)
    texts = said(shown)
    for text in texts.values():
        for word in words:
            assert word.replace(" x ", " ") in text.replace(" x ", " ").replace(" $\\times$ ", " ")
        assert "edited" not in text
    assert ("over samples" in texts["figure"]) == ("sample" not in part)
    if part in ({"sample": 1}, {"layer": 2}):
        assert ("range over samples" in tables.render(shown, by="layer")) == ("layer" in part)


def test_what_was_edited_is_called_edited_and_nothing_is_claimed_of_it(ds):
    changed = ds.copy(deep=True)
    changed["exact"][0, 1, 2] *= 1.5
    setting = ds.assign_attrs(tol=1e-9)
    with xr.set_options(keep_attrs=True):
        others = [ds * 2, xr.concat([ds, ds], "sample"), changed, setting]
    for other in others:
        for text in said(other).values():
            assert "edited" in text
            assert "enclosed to" not in text
            assert "probability" not in text
        twice = xr.concat([ds, ds], "layer")
    assert "4 samples" in tables.caption(others[1])
    for by in ("layer", "head"):
        once = tables.table_of(ds, by=by).shown
        pd.testing.assert_frame_equal(tables.table_of(twice, by=by).shown, pd.concat([once, once]))
    assert all("edited" not in text for text in said(ds).values())


def test_variables_that_were_left_out_are_not_missed(ds):
    part, label = ds[["exact", "yudin"]], "Yudin 2025, Thm 3"
    found, whole = (tables.summary(one).loc[["yudin"], "geomean"] for one in (part, ds))
    assert list(tables.summary(part).index) == ["yudin"]
    np.testing.assert_array_equal(found, whole)
    drawn = [axes for axes in plots.heatmaps(part).axes if axes.images]
    assert [axes.get_title().split("\n")[0] for axes in drawn] == ["Exact", label]
    assert [text.get_text() for text in plots.ratios(part).get_yticklabels()] == [label]
    assert citations.citation_keys(part) == ["yudin2025pay", "lipbound2026"]
    assert label in tables.render(part, by="head")
    assert "cannot exclude that others were edited" in tables.caption(part)
    kim = tables.render(ds[["exact", "kim", "yudin"]])
    assert "left out, since the exact norm of its own map is not there: kim" in kim


def test_labels_are_the_users(ds):
    mine = {"lipbound": "This 50% work", "yudin": "Yudin et al.", "exact": "Norm"}
    mine |= {"model": "MiniLM", "data": "Alice"}
    table = tables.render(ds, "latex", labels=mine)
    assert "This 50\\% work & " in table
    for text in (
        plots.caption(ds, labels=mine),
        citations.methods(ds, "text", labels=mine),
        citations.cite(ds, labels=mine),
    ):
        assert "MiniLM (" in text
        assert "Alice" in text
    drawn = [axes for axes in plots.heatmaps(ds, labels=mine).axes if axes.images]
    titles = {axes.get_title().split("\n")[0] for axes in drawn}
    assert {mine[k] for k in ("exact", "lipbound", "yudin")} <= titles
    assert "edited" not in tables.render(ds, labels=mine)  # what it is called is no setting


def test_without_bounds_the_table_is_of_exact_norms(ds):
    """No empty table: means and ends as numpy has them, in every format; nothing is said of bounds,
    in captions either."""
    part = ds.isel(layer=[1, 2])
    made = tables.table_of(part, bounds=[])
    (row,) = made.numbers.to_dict("records")
    values = part["exact"].values
    single = np.exp(np.log(values).mean((1, 2)))
    expected = {
        "geomean": np.exp(np.log(values).mean()),
        "min": values.min(),
        "max": values.max(),
        "sample_min": single.min(),
        "sample_max": single.max(),
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert np.isnan([row["interval_lower"], row["interval_upper"]]).all()  # of two samples
    for form, write in tables.WRITERS.items():
        text = write(made)
        assert "below exact" not in text
        assert "bound / exact" not in text.lower(), form
    assert "log10 of the local Lipschitz constant, each the" in plots.caption(part, bounds=[])
    assert "constant and its bound, each" in plots.caption(part, bounds=["yudin"])
    assert "constant and its bounds, each" in plots.caption(part)
