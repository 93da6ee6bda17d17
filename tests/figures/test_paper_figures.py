"""The papers' figures: small settings run through, drawn, described; numbers against oracles."""

import re

import castin2024
import numpy as np
import ours2026  # noqa: F401
import pytest
import torch
from paper_figure import FIGURES, Setting, figure_named, main
from support import token_oracle
from support.checks import normal, refused
from yudin2025 import consequences

import lipbound as lb
from lipbound.runs import store

GROWTH = ("castin-1", "castin-6")
"""Run at fewer lengths by `test_growth_figure`."""
SLOW = "three-norms token-profile mass-splitting yudin-2 yudin-multihead castin-2 castin-3 yudin-3"
SLOW = {*SLOW.split(), "which-map", "yudin-5", "yudin-6", "yudin-tables", "yudin-theorem-4"}
QUICK = [name for name in FIGURES if name not in {*SLOW, *GROWTH}]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))]
)
def test_figure_from_the_command_line(name, tmp_path):
    text = tmp_path / "short.csv"
    words = "the lighthouse keeper wound the clock of the island and "
    text.write_text(f"text\n{words * 3}the ferry\n")
    arguments = ["--data", str(text)] if figure_named(name).of_model else []
    main([name, "builtin:gpt2", *arguments, "--samples", "1", "-o", str(tmp_path)])
    for kind in ("pdf", "png", "txt", "tex"):
        assert (tmp_path / f"{name}.{kind}").stat().st_size > 100
    ds = store.load(tmp_path / figure_named(name).stored)
    assert f"{ds.attrs['figure']}.zarr" == figure_named(name).stored
    first = (tmp_path / f"{name}.png").read_bytes()
    main([name, "builtin:gpt2", "-o", str(tmp_path)])
    assert (tmp_path / f"{name}.png").read_bytes() == first  # from the saved run


@pytest.mark.slow
def test_growth_figure_named(tmp_path, monkeypatch):
    monkeypatch.setattr(castin2024, "LENGTHS", (2, 10, 12, 14))
    text = tmp_path / "words.txt"
    text.write_text("the lighthouse keeper wound the clock of the island " * 300)
    table = tmp_path / "words.csv"
    table.write_text("label,words\n" + "0,the clock of the lighthouse keeper\n" * 100)
    setting = Setting("builtin:gpt2", (str(text), str(table)), column="words", samples=1)
    ds = figure_named("castin-1").compute(setting)
    assert ds["text"].values.tolist() == ["words.txt", "words.csv"]  # the column is the table's
    assert ds["mode"].values.tolist() == ["decoder"]  # GPT-2 is one anyway
    assert ds.sizes["length"] == 4
    assert "median exponent is" in figure_named("castin-1").caption(ds)
    figure_named("castin-1").render(ds, tmp_path)
    figure_named("castin-6").render(ds, tmp_path)


def test_list_and_unknown(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--help"])
    listing = capsys.readouterr().out
    assert all(f"\n{name}: " in listing for name in FIGURES)
    for words, said in {
        "castin-9": "error: unknown figure 'castin-9'; did you mean 'castin-",
        "castin-1 builtin:gpt3": "did you mean 'gpt2'",
        "castin-1 --samples 0": "samples is 0",
        "castin-1 --dtype half": "dtype is 'half'; allowed are",
    }.items():
        with pytest.raises(SystemExit, match=re.escape(said)):
            main([*words.split(), "-o", str(tmp_path / "figures")])
    refused(lambda: figure_named("castin1"), "castin-1", error=lb.errors.UnknownNameError)


def test_statistics_are_those_of_the_rows():
    setting = Setting("builtin:gpt2", samples=1)
    ds = figure_named("yudin-2").compute(setting)
    _, layers, _ = setting.capture(1)
    p = layers[1].double().p[:, :2]
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    norms = torch.linalg.eigvalsh(m)[..., -1]
    np.testing.assert_allclose(ds["norm"].isel(layer=1, head=[0, 1]), norms.mean((0, 2)), rtol=1e-6)
    top = p.sort(-1, descending=True).values
    g1 = (top[..., 0] * (1 - top[..., 0] + top[..., 1])).mean((0, 2))
    np.testing.assert_allclose(ds["g1"].isel(layer=1, head=[0, 1]), g1, rtol=1e-9)
    assert ds.attrs["below"] == 0


def test_consequences_hold_and_would_notice():
    draw = normal()
    for spread in (0.1, 1.0, 5.0):
        p = torch.softmax(spread * draw(500, 12), -1)
        for slack in consequences(p).values():
            assert float(slack) >= -1e-12
    flat = torch.full((1, 12), 1 / 12, dtype=torch.float64)
    assert 0 <= float(consequences(flat)["proposition_1"]) < 0.03  # gamma = 1


def test_rows_too_short_for_theorem_4_are_refused():
    with pytest.raises(lb.errors.InputsError, match="rows of 5 tokens and more"):
        figure_named("yudin-theorem-4").compute(Setting("builtin:gpt2", (["the"],), samples=1))


@pytest.mark.slow
def test_radius_regimes_of_the_papers():
    ds = figure_named("castin-3").compute(Setting("builtin:gpt2"))
    np.testing.assert_allclose(ds["generic"].isel(reach=-1), ds["limit"], rtol=1e-3)
    far = ds["quadratic"].isel(radius=[-2, -1])
    apart = np.log(ds["radius"].values[-1] / ds["radius"].values[-2])
    slope = np.log(far.isel(radius=1) / far.isel(radius=0)) / apart
    np.testing.assert_allclose(slope, 2, atol=0.01)
    late = ds["scaling"] >= 6
    np.testing.assert_allclose(ds["dirac"][late], ds["dirac_predicted"][late], rtol=1e-3)


def test_three_norms_are_those_of_the_layers():
    setting = Setting("builtin:gpt2", (["the keeper wound the clock of the island"],), samples=1)
    ds = figure_named("three-norms").compute(setting)
    norms = {name: ds["exact"].sel(norm=name) for name in ds["norm"].values}
    att = setting.capture(1)[1][2].double().select(heads=slice(0, 2))
    exact = token_oracle.one(token_oracle.blocks(att, 0))[0]
    found = norms["one-token"].isel(layer=2, sample=0, head=[0, 1])
    np.testing.assert_allclose(found, exact, rtol=1e-3)
    steepest = norms["every-token"].mean("sample").values
    layer, head = np.unravel_index(steepest.argmax(), steepest.shape)
    assert f"head {head} of layer {layer} (every-token)" in figure_named("three-norms").caption(ds)


def test_token_profiles_name_the_steepest_token_and_leave_padding_out():
    setting = Setting("builtin:gpt2", (["the gulls", "the island of the gulls"],), samples=2)
    ds = figure_named("token-profile").compute(setting)
    words = ds["text"].values[0][ds["real"].values[0]].tolist()
    assert "".join(words) == "the gulls"
    assert len(words) < ds.sizes["token"]
    _, (att, *_), _ = setting.capture(2, 48)
    for sample in (0, 1):
        blocks = token_oracle.blocks(att.select(heads=slice(0, 1)), sample)
        n = blocks.shape[1]
        truth = torch.linalg.matrix_norm(blocks.transpose(1, 2).flatten(2, 3), 2)
        np.testing.assert_allclose(ds["moved"][0, sample, :1, :n], truth, rtol=1e-5)
        rows = token_oracle.rows(blocks)
        np.testing.assert_allclose(ds["output_upper"][0, sample, :1, :n], rows, rtol=1e-5)
        assert not ds["moved"][:, sample, :, n:].any()
    first = ds["moved"][:, :1].values
    layer, _, head, token = np.unravel_index(first.argmax(), first.shape)
    caption = figure_named("token-profile").caption(ds)
    assert f"all heads of layer {layer}" in caption
    assert f'head {head} at "{ds["text"].values[0, token]}"' in caption
    figure = figure_named("token-profile").draw(ds)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == words


def test_ellipsoids_hold_all_tokens():
    for model in ("builtin:gpt2", "builtin:vit"):
        ds = figure_named("castin-2").compute(Setting(model, samples=2))
        assert bool((ds["largest_token"] <= ds["ellipsoid_radius"] * (1 + 1e-6)).all())
