"""What figures, tables, paragraphs and pages refuse, each in one sentence: the call, the class of
the error, and words that must occur."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from support.checks import refused
from support.runs import made_up
from support.variants import layer

import lipbound as lb
from lipbound import plots, tables
from lipbound.analysis import cache_bits
from lipbound.errors import LipboundError, StoreError, UnknownNameError
from lipbound.reporting import statistics
from lipbound.reporting import tables as citations

BAD, UNKNOWN = LipboundError, UnknownNameError
CURVE = "lipbound.radius_curve"
YUDIN = {"bounds": ["yudin"]}
OF_RUN: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (plots.heatmaps, {"reduce": "meen"}, UNKNOWN, "did you mean 'mean'"),
    (plots.heatmaps, {"reduce": 1.5}, BAD, "between 0 and 1"),
    (plots.heatmaps, {"scale": "pannel"}, UNKNOWN, "did you mean 'panel'"),
    (plots.heatmaps, {"style": "icml204"}, UNKNOWN, "'icml204'; did you mean 'icml2024'"),
    (plots.heatmaps, {"width": -1}, BAD, "width is -1"),
    (plots.heatmaps, {"width": "poster"}, BAD, "'poster'; it must be a number of inches"),
    (plots.heatmaps, {"font_size": 0}, BAD, "font_size is 0; it must be a number of points"),
    (plots.heatmaps, {"labels": ["a"]}, BAD, "labels is ['a']; give a text for each name"),
    (plots.heatmaps, {"labels": {"yudin": 3}}, BAD, "the label of yudin is 3; give a text"),
    (plots.heatmaps, {"bounds": ["yudn"]}, UNKNOWN, "did you mean"),
    (plots.heatmaps, {"bounds": ["newhouse"]}, UNKNOWN, "the run has no bound 'newhouse'"),
    (plots.heatmaps, {"bounds": "condition"}, UNKNOWN, "compare the model with extras"),
    (plots.heatmaps, {"bounds": ["yudin", "condition"]}, UNKNOWN, "no 'condition'; compare"),
    (plots.heatmaps, {"bounds": [], "over": "exact"}, BAD, "the run has no bounds"),
    (plots.heatmaps, {"limits": (1, 0)}, BAD, "limits is (1, 0); give log10 of both ends"),
    (plots.heatmaps, {"path": "x.docx"} | YUDIN, BAD, "no file type that can be drawn"),
    (plots.heatmaps, {"path": "setup.cfg/x.png"} | YUDIN, StoreError, "cannot be written"),
    (plots.heatmap, {"name": "yudn"}, UNKNOWN, "unknown panel of the run 'yudn'; did you mean"),
    (plots.heatmap, {"name": "frobenius"}, UNKNOWN, "has no 'frobenius'; compare the model with"),
    (plots.heatmap, {"name": "lipbound", "over": "yudin"}, UNKNOWN, "unknown over 'yudin'"),
    (plots.heatmap, {"over": "exact"}, UNKNOWN, "unknown panel of the run 'exact'"),
    (plots.heatmap, {"colorbar": "no"}, BAD, "colorbar is 'no'"),
    *(
        (draw, {"ax": Figure()}, BAD, "ax is of type Figure; give one matplotlib Axes")
        for draw in (plots.heatmap, plots.by_layer, plots.ratios)
    ),
    (plots.by_layer, {"labels": ["a", "b"]}, BAD, "2 labels were given for 1 runs"),
    (plots.over_steps, {}, BAD, "no steps of training; lb.Monitor makes one"),
    (plots.ball_curve, {}, BAD, f"has no 'radius'; give what {CURVE}"),
    (tables.render, {"by": "heads"}, UNKNOWN, "did you mean 'head'"),
    (tables.render, {"values": "ratios", "by": "layer"}, UNKNOWN, "did you mean 'ratio'"),
    (tables.render, {"reduce": "median"}, BAD, "rows per bound are geometric means of ratios"),
    (tables.render, {"bounds": ["newhouse", "yudn"]}, UNKNOWN, "'yudn'; did you mean 'yudin'"),
    (tables.render, {"format": "latx"}, UNKNOWN, "did you mean 'latex'"),
    (tables.render, {"labels": {"lipbond": "x"}}, UNKNOWN, "unknown label 'lipbond'; did"),
    (tables.render, {"format": "latex", "width": "colum"}, UNKNOWN, "did you mean 'column'"),
    (tables.render, {"format": "latex", "width": 3}, BAD, "at least 120, or one of"),
    (tables.render, {"width": "page"}, BAD, "number of characters"),
    (tables.render, {"width": 3}, BAD, "at least 15"),
    (tables.render, {"format": "csv", "width": 80}, BAD, "csv has none"),
    (tables.render, {"format": "markdown", "width": "page"}, BAD, "markdown has none"),
    (statistics.requested, {"bounds": "castin,yudn"}, UNKNOWN, "'yudn'; did you mean 'yudin'"),
    (lb.report, {"path": "x.pdf"}, BAD, "not an .html file"),
    (lb.report, {"path": "x.html", "sample": 3}, BAD, "sample is 3; the run has samples 0 to 1"),
    (lb.report, {"path": "x.html", "device": "gpu"}, BAD, "device 'gpu' cannot be used here"),
    (lb.report, {"path": "setup.cfg/x.html"}, StoreError, "cannot be written"),
]


@pytest.mark.parametrize("call", OF_RUN, ids=lambda call: f"{call[0].__name__} {call[1]}"[:60])
def test_of_a_run(call: tuple[Any, dict[str, Any], type[Exception], str]) -> None:
    function, options, error, words = call
    refused(partial(function, made_up(), **options), words, error=error)
    assert not Path("x.html").exists()


def test_of_several_runs(tmp_path: Path) -> None:
    ds, page = made_up(), partial(lb.report, path=tmp_path / "x.html")
    other, profile = ds.assign_attrs(map="layer"), lb.token_profile(layer(2, frozenset(), n=9))
    with xr.set_options(keep_attrs=True):
        difference = ds - 2 * ds
    for function, given, options, words in (
        (plots.heatmaps, [], {}, "no run was given"),
        (plots.heatmaps, [ds, None], {}, "a run is wanted, not None"),
        (plots.heatmaps, [ds, other], {}, "head and layer share no colour scale"),
        (plots.heatmaps, [ds, ds], {"labels": ["a"]}, "1 labels were given for 2 runs"),
        (plots.heatmaps, [ds], {"bounds": ["frobenius"]}, "frobenius"),
        (plots.heatmap, ds.assign_attrs(bounds=[]), {"over": "exact"}, "the run has no bounds"),
        (plots.ratios, ds[["exact"]], {}, "no bounds, whose ratios"),
        (plots.by_layer, [], {}, "no run was given"),
        (plots.by_layer, [ds, other], {}, "runs of map head and layer share no axis"),
        (plots.token_profile, profile, {"sample": 5}, "sample is 5"),
        (plots.token_profile, profile, {"heads": [9]}, "heads are [9]"),
        (plots.token_profile, profile, {"tokens": ["a"]}, "1 tokens"),
        (tables.render, ds.assign_attrs(bounds=[]), YUDIN, "no bound 'yudin'; it has none"),
        (page, [], {}, "no run was given"),
        (page, [ds, ds], {"model": "m"}, "for a single run"),
        *(
            (function, difference, {}, "negative, as in the difference of two runs")
            for function in (
                *(plots.heatmaps, plots.ratios, plots.heatmap, citations.methods),
                *(tables.render, tables.summary, tables.breakdown),
            )
        ),
    ):
        refused(partial(function, given, **options), words)


@pytest.mark.parametrize("given", [3, None, xr.Dataset({"a": ("x", np.ones(1))})])
def test_of_what_is_no_run(given: Any, tmp_path: Path) -> None:
    """A number, nothing or another Dataset in place of a run, or of its parts."""
    kind = "of type Dataset" if isinstance(given, xr.Dataset) else str(given)
    no_run = "it is no run" if isinstance(given, xr.Dataset) else "a run is wanted, not"
    for function, words in (
        (plots.token_profile, f"profile is {kind}; give what lb.token_prof"),
        (lb.load, f"path is {kind}; give the path of a stored run"),
        (partial(plots.reduce_samples, how="mean"), "a variable over sample is wanted, not"),
        (plots.over_steps, "no steps of training"),
        (plots.by_layer, no_run),
        (partial(lb.report, path=tmp_path / "page.html"), no_run),
        (cache_bits.ranking, "give what lipbound.cache_bits returns"),
        (cache_bits.agreement, "give what lipbound.cache_bits returns"),
    ):
        refused(partial(function, given), words)
