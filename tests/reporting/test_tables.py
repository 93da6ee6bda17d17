"""Tables by bound, layer and head; the digits they show; citations; and what hostile names become
in them."""

import io
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checks import refused
from support.models import AFFINE, build, inputs_for
from support.runs import made_up

import lipbound as lb
from lipbound.formatting import digits, directed, number
from lipbound.reporting import statistics
from lipbound.reporting import tables as citations

HOSTILE = (
    "<script>alert(1)</script> | [x](javascript:y) $\\input{/etc/passwd}$ #_^~%&{} "
    "\x1b[31m\n\r\u202e\u2028@evil, \U0001f600"
)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(x=st.floats(1e-12, 1e12), width=st.floats(1e-9, 0.5), where=st.floats(0, 1))
def test_digits_are_those_that_the_enclosure_supports(x, width, where):
    """The true value, anywhere in x (1 -+ width / 2), is at most one unit of the last digit away
    from what is shown; one more digit need not be."""
    count = digits(x * (1 - width / 2), x * (1 + width / 2))
    text = number(x, count).replace(",", "")
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    if "." not in mantissa and not exponent:
        unit = 10.0 ** (np.floor(np.log10(float(text))) - count + 1)
    if width * x <= 10 ** np.floor(
        np.log10(x)
    ):  # else not even one digit is known, and one is shown
        assert abs(float(text) - x * (1 + (where - 0.5) * width)) <= unit * (1 + 1e-6)
    assert 1 <= count <= 4
    if 1 < count < 4:
        assert width * x <= 10.0 ** (np.floor(np.log10(x)) - count + 1) * (1 + 1e-9)
    if count < 4:
        assert width * x > 10.0 ** (np.floor(np.log10(x)) - count) * (1 - 1e-9)


def test_printed_summaries_have_the_range_and_the_audit(ds):
    """In 80 characters, where pandas leaves out columns in the middle; the longest name is there,
    and each ratio takes as many characters as any."""
    summary = lb.tables.summary(ds)
    summary.loc["castin_masked_mean_field", ["geomean", "min"]] = 1.234567e-100
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        head = str(summary).splitlines()[0].split()
    assert [*head[:2], *head[-2:]] == ["geomean", "min", "sound", "violations"]


def ends_of(cell):
    """Both ends of a cell, alike where it is one number."""
    ends = [float(end.replace(",", "").replace("n/a", "nan")) for end in cell.split(" to ")]
    return ends[0], ends[-1]


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("by", lb.tables.BY)
def test_no_figure_contradicts_its_neighbour(by, seed):
    """Whatever is resolved or not: printed ends are beyond those of all enclosures, the printed
    mean is between them and within a unit of its enclosure, and no bound that holds is below 1."""
    rng = np.random.default_rng(seed)
    ds = made_up(samples=4 + seed % 3)
    shape = ds["exact"].shape
    ds["exact"][...] = np.exp(rng.normal(size=shape))
    wide = rng.choice([1e-4, 1e-2, 3.0, np.inf], p=[0.8, 0.1, 0.07, 0.03], size=shape)
    ds["exact_upper"] = ds["exact"] * (1 + wide)
    for name, factor in {"yudin": 1.02, "lipbound": 1.0}.items():
        above = factor * np.exp(np.abs(rng.normal(scale=0.3, size=shape)))
        ds[name][...] = ds["exact"].values * above
    made = lb.tables.table_of(ds, by, bounds=["yudin", "lipbound"])
    levels = ["layer", "head"][: lb.tables.BY.index(by)]
    inner = [dim for dim in ds["exact"].dims if dim not in ("sample", *levels)]
    for key, row in made.shown.iterrows():
        if by == "bound":
            name, at = key, {}
            low = np.maximum(ds[name] / ds["exact_upper"], 1.0)  # its assumptions hold
            high = ds[name] / ds["exact"]
        else:
            places = [key] if by == "layer" else key
            at = dict(zip(levels, places, strict=True))
            low, high = ds["exact"].sel(at), ds["exact_upper"].sel(at)
        means = [np.log(end).mean([*inner, "sample"]) for end in (low, high)]
        single = [np.exp(np.log(end).mean(inner)) for end in (low, high)]
        lower, upper = ends_of(row["geom. mean" if by == "bound" else "exact"])
        sample_min, sample_max = ends_of(row[statistics.RANGE])
        assert sample_min <= float(single[0].min()) * (1 + 1e-12)
        assert sample_max >= float(single[1].max()) * (1 - 1e-12)
        assert sample_min <= lower <= upper <= sample_max
        if lower < upper:
            assert lower <= np.exp(float(means[0])) * (1 + 1e-12)
            assert upper >= np.exp(float(means[1])) * (1 - 1e-12)
        if statistics.LIKELY in row:
            limits = ends_of(row[statistics.LIKELY])
            assert not limits[0] > lower
            assert not limits[1] < upper
        if by == "bound":
            least, most = float(row["min"].replace(",", "")), float(row["max"].replace(",", ""))
            assert 1 <= least <= float(low.min()) * (1 + 1e-12)
            assert most >= float(high.max()) * (1 - 1e-12)
            assert least <= sample_min
            assert sample_max <= most


@settings(deadline=None, max_examples=300, derandomize=True)
@given(x=st.floats(1e-300, 1e300), count=st.integers(1, 6))
def test_ends_are_rounded_outwards_by_less_than_a_unit(x, count):
    low, high = (float(directed(x, count, up).replace(",", "")) for up in (False, True))
    assert low <= x * (1 + 1e-12)
    assert high >= x * (1 - 1e-12)
    assert high - low <= 10.0 ** (np.floor(np.log10(x)) - count + 1) * (1 + 1e-9)


def test_more_digits_for_closer_enclosures(ds):
    """Four where 1e-3 or less is known, two ends where it is a fifth; there is no upper end for L2
    attention, whose norm counts as if it were tol wide."""
    model = build(AFFINE["gpt2"])
    options = {"bounds": ["yudin"], "progress": False}
    close = lb.compare(model, inputs_for(model), tol=1e-8, dtype="float64", **options)
    wide = lb.compare(model, inputs_for(model), tol=0.2, **options)
    rough = lb.compare(model, inputs_for(model), tol=0.2, delta=None, **options)
    shown = [lb.tables.readable(one).loc["yudin", "geom. mean"] for one in (rough, ds, close)]
    assert [len(re.sub("[^0-9]", "", text).lstrip("0")) for text in shown[1:]] == [4, 4]
    low, high = (float(one.replace(",", "")) for one in shown[0].split(" to "))
    ends = [lb.tables.summary(rough).loc["yudin", "geomean"] / by for by in (1.2, 1)]
    assert low <= ends[0] < ends[1] <= high < 1.2 * 1.1**2 * low  # two digits

    def width(run, name):
        low, high = (statistics.geomean(statistics.quantity(run, name, end)) for end in (0, 1))
        return high / low - 1

    assert width(rough, "yudin") > width(ds, "yudin") > width(close, "yudin")
    assert width(wide, "yudin") <= 0.2
    assert width(rough, "yudin") == pytest.approx(0.2, rel=1e-3)
    assert width(ds, "kim") == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("how", ["geomean", "mean", "max", "median", 0.25])
@pytest.mark.parametrize("by", ["layer", "head"])
@pytest.mark.parametrize("values", ["ratio", "value"])
def test_breakdown_by_plain_numpy(ds, by, how, values):
    table = lb.tables.breakdown(ds, by, bounds=["yudin", "kim"], reduce=how, values=values)
    assert table.index.names == (["layer"] if by == "layer" else ["layer", "head"])
    functions = {
        "geomean": lambda a: np.exp(np.log(a).mean()),
        "mean": np.mean,
        "max": np.max,
        "median": np.median,
    }
    reduce = functions[how] if isinstance(how, str) else lambda a: np.quantile(a, how)
    for place, row in table.iterrows():
        at = {"layer": place} if by == "layer" else dict(zip(("layer", "head"), place, strict=True))
        one = ds.sel(at)
        assert row["exact"] == pytest.approx(reduce(one["exact"].values.ravel()))
        for name, exact in (("yudin", "exact"), ("kim", "exact_l2")):
            expected = (one[name] / one[exact] if values == "ratio" else one[name]).values.ravel()
            assert row[name] == pytest.approx(reduce(expected))
        single = [reduce(one["exact"].isel(sample=s).values.ravel()) for s in range(2)]
        assert row["sample_min"] == pytest.approx(min(single))
        assert row["sample_max"] == pytest.approx(max(single))


@pytest.mark.parametrize("by", lb.tables.BY)
def test_every_table_in_every_format(ds, by):
    options = {"by": by, "bounds": ["castin", "lipbound"]}
    options |= {} if by == "bound" else {"reduce": "median"}
    made = lb.tables.table_of(ds, **options)
    for format in ("text", "markdown", "latex"):
        # headings of LaTeX in several lines
        text = " ".join(lb.tables.WRITERS[format](made).replace("\\\\", " ").split())
        for part in ("Castin 2024, 3.3", "(castin):", "GPT2Model"):
            assert part in text
        assert "(float32 model), enclosed to 0.001 with failure probability" in text
        assert "(specformer):" not in text  # footnotes of what is shown
        assert ("median over samples" in text.lower()) == (by != "bound")
    table = pd.read_csv(io.StringIO(lb.tables.render(ds, "csv", **options)))
    assert len(table) == {"bound": 2, "layer": 2, "head": 8}[by]
    if by == "head":
        expected = ds["exact"].median("sample").values.ravel()
        np.testing.assert_allclose(table["exact"], expected, rtol=1e-12)


def test_latex_sets_numbers_one_way(ds):
    for by in lb.tables.BY:
        text = lb.tables.latex(ds, by=by, width="page")
        bodies = re.findall(r"\\midrule\n(.*?)\\bottomrule", text, re.DOTALL)
        cells = [
            cell.strip()
            for body in bodies
            for line in body.strip().splitlines()
            for cell in line.removesuffix("\\\\").split("&")[by == "bound" :]
        ]
        cells = [cell for cell in cells if cell not in ("everywhere", "nowhere")]
        assert len(cells) >= 30
        for cell in cells:
            assert all(
                part in ("$\\infty$", "--") or re.fullmatch(r"\\num\{\d+(\.\d+)?(e-?\d+)?\}", part)
                for part in re.split("--|/", cell)
                if part
            ), cell
        notes = text.partition("\\raggedright\\noindent")[2]
        assert "$^\\dagger$ Castin 2024, 3.3 (castin)" in notes
        assert "$x \\to \\mathrm{softmax}(q k^{T}) v$" in notes
        assert "failure probability $10^{-6}$" in notes
        assert not any("dagger" in line for line in text.splitlines() if line.startswith("%"))


def test_whole_layers_have_no_heads(ds):
    model = build(AFFINE["gpt2"])
    layers = lb.compare(model, inputs_for(model), map="layer", bounds=["lipbound"], progress=False)
    assert list(lb.tables.breakdown(layers, "layer").index) == [0, 1]
    assert "samples:" in lb.tables.render(layers, by="layer")
    refused(lambda: lb.tables.breakdown(layers, "head"), "has no heads")
    assert "2 layers)" not in citations.methods(layers, "text")
    assert "2 layers; weights" in citations.methods(layers, "text")


def test_hostile_names_stay_text(ds):
    hostile = ds.copy(deep=True)
    names = "model data architecture device revision preprocessing map_description"
    hostile.attrs |= dict.fromkeys(names.split(), HOSTILE)
    for name in ("castin", "yudin"):
        hostile[name].attrs |= {"label": HOSTILE, "caveat": HOSTILE}
    hostile.attrs["not_applicable"] = {"newhouse": HOSTILE}
    for by in lb.tables.BY:
        made = lb.tables.table_of(hostile, by)
        text = lb.tables.WRITERS["text"](made)
        assert "\x1b" not in text
        assert "\u202e" not in text
        marked = lb.tables.WRITERS["markdown"](made)
        assert "<script>" not in marked
        assert "\\[x\\](javascript:y)" in marked
        assert not re.search(r"(?<!\\)\[x", marked)
        assert "\x1b" not in marked
        rows = [line for line in marked.splitlines() if line.startswith("|")]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1  # no cell ends early
        typeset = lb.tables.WRITERS["latex"](made)
        lines = [line for line in typeset.splitlines() if not line.startswith("%")]
        assert not any("\\input" in line or "\r" in line for line in lines)
        assert "\\textbackslash{}input\\{/etc/passwd\\}" in "".join(lines)
        assert typeset.count("\\begin{tabular}") == typeset.count("\\end{tabular}") >= 1
    bib = citations.cite(hostile)
    assert bib.count("@") == len(citations.citation_keys(hostile))  # every @ begins an entry
    assert "{\\char64}evil" in bib
    assert "\\input{" not in citations.cite(hostile, "latex")


def test_a_run_says_itself_what_its_bounds_are(ds):
    """As `lipbound.compare` wrote it, whatever the registry says."""
    own = ds.rename(castin="mine", castin_sound="mine_sound")
    own.attrs["bounds"] = [{"castin": "mine"}.get(name, name) for name in ds.attrs["bounds"]]
    own["mine"].attrs["caveat"] = "it is mine"
    assert "\u2020 Castin 2024, 3.3 (mine): it is mine" in lb.tables.render(own, bounds=["mine"])
    refused(lambda: citations.citation_keys(own), "unknown bound 'mine'")


def test_methods_say_the_settings_of_the_run(ds):
    text, typeset = citations.methods(ds, "text"), citations.methods(ds)
    found = [ds.attrs[name] for name in ("revision", "data_fingerprint", "architecture")]
    for part in (
        *found,
        *("lipbound 0.1.0", "2 layers x 4 heads", "torch 2.", ds.attrs["date"][:10]),
        f"2 samples of at most {ds.attrs['tokens']} tokens",
        *("(float32 model)", "enclosed to 0.001 with failure probability 1e-6", "seed 0"),
        *("(Yudin et al. 2025)", "(Castin et al. 2024)"),
    ):
        assert part in text, part
    assert set(re.findall(r"\\cite\{(\w+)\}", typeset)) == set(citations.citation_keys(ds))
    keys = "kim2021lipschitz hu2024specformer castin2024smooth yudin2025pay lipbound2026"
    assert [lb.tables.bibtex(ds).count(f"{{{key},") for key in keys.split()] == [1] * 5
    assert "$1 - 10^{-6}$" in typeset
    model, options = build(AFFINE["gpt2"]), {"bounds": ["yudin"], "progress": False}
    rough = lb.compare(model, inputs_for(model), delta=None, samples=1, **options)
    for said in (citations.methods(rough, "text"), lb.tables.render(rough)):
        assert "lower ends, sought to 0.001" in said


def test_below_exact_is_told(ds):
    other = ds.copy(deep=True)
    other["castin"][...] = other["exact"] / 2
    other["castin"].attrs["caveat"] = "it is 50 % of\n\\input{x}"
    said = "in 16 of 16 cases, because it is 50 % of \\input{x}."
    assert said in citations.methods(other, "text")
    assert "because it is 50 \\% of \\textbackslash{}input\\{x\\}." in citations.methods(other)


def test_citations_come_from_the_registry(ds):
    other = ds.copy(deep=True)
    other["yudin"].attrs["citation"] = "x}\\input{/etc/passwd"
    assert "\\input{" not in citations.cite(other, "latex")
    assert citations.citation_keys(other) == citations.citation_keys(ds)
    other.attrs["tol"] = "\\input{x}"
    refused(lambda: citations.methods(other), "its setting 'tol' is")
