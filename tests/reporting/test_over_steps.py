"""Runs over steps of training, shown: which step it is, and lines that are the numbers."""

import numpy as np
import pytest
import torch
from support.commands import command, said
from support.models import AFFINE, build

import lipbound as lb
from lipbound.errors import LipboundError
from lipbound.reporting.labels import run_caption, step_words


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A stored run of three steps, between which weights change."""
    model, out = build(AFFINE["gpt2"]), tmp_path_factory.mktemp("steps") / "run.zarr"
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    monitor = lb.Monitor(model, ids, every=5, out=out, bounds=["lipbound"])
    for step in (0, 5, 10):
        monitor.step(step)
        with torch.no_grad():
            for block in model.h:
                block.attn.c_attn.weight.mul_(1.5)
    return out


@pytest.fixture
def ds(path):
    return lb.load(path)


def test_lines_are_the_numbers_of_layers(ds, tmp_path):
    for name, how in (("exact", "geomean"), ("largest_logit", "max"), ("entropy", "mean")):
        axes = lb.plots.over_steps(ds, name, tmp_path / f"{name}.svg")
        for layer, line in enumerate(axes.lines):
            values = ds[name].sel(layer=layer).transpose("step", ...).values.reshape(3, -1)
            own = np.exp(np.log(values).mean(1)) if how == "geomean" else getattr(values, how)(1)
            np.testing.assert_allclose(line.get_ydata(), own, rtol=1e-12)
            assert list(line.get_xdata()) == [0, 5, 10]
        assert axes.get_yscale() == ("log" if name == "exact" else "linear")
    words = (tmp_path / "exact.caption.txt").read_text()
    assert words.startswith("Exact: geometric mean over samples and heads, a line for every layer.")
    assert "at 3 steps of training from 0 to 10" in words


def test_quantities_that_a_run_over_steps_has_not(ds):
    with pytest.raises(LipboundError, match="unknown quantity 'entropie'; did you mean 'entropy'"):
        lb.plots.over_steps(ds, "entropie")


def test_tables_and_captions_are_of_the_last_step_or_say_which(ds):
    assert "after 10 steps of training" in run_caption(ds)
    assert step_words(ds) == "at 3 steps of training from 0 to 10"
    assert lb.tables.render(ds) == lb.tables.render(ds.sel(step=10))
    table = lb.tables.breakdown(ds.sel(step=5), "head")
    means = np.exp(np.log(ds["exact"].sel(step=5)).mean("sample"))
    np.testing.assert_allclose(table["exact"], means.values.ravel())
    assert lb.tables.summary(ds).loc["lipbound", "violations"] == 0


def test_commands_take_a_step(path, whole, tmp_path):
    page, figure, other = (tmp_path / name for name in ("page.html", "map.png", "run.zarr"))
    for line, step in (
        (f"table {path} --step 5 --by layer", "after 5 steps of training"),
        (f"cite {path} --format text --step 0", "after 0 steps of training"),
        (f"info {path}", "at 3 steps of training from 0 to 10"),
    ):
        assert step in " ".join(said(line).split())
    for line, file, step in (
        (f"heatmap {path} -o {figure}", tmp_path / "map.caption.txt", 10),
        (f"report {path} -o {page}", page, 10),
        (f"report {path} -o {page} --step 5", page, 5),
    ):
        said(line)
        assert f"after {step} steps of training" in file.read_text(encoding="utf-8")
    lb.save(whole, other)
    for run, words in (
        (path, "step 6 was not measured; of 3 steps, from 0 to 10, the nearest are 0, 5, 10"),
        (other, "the run is not one over steps of training"),
    ):
        status, _, err = command(f"table {run} --step 6")
        assert (status, words in err) == (2, True), err
