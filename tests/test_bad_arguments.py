"""Arguments of wrong types and out of range in Python: a LipboundError of one sentence each; nearly
right ones are accepted."""

from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from support.checks import refused
from support.layers import random_attention
from support.models import AFFINE, build, inputs_for

import lipbound as lb
from lipbound.errors import DamagedRunWarning, LipboundError, Notice, UnknownNameError
from lipbound.models.checkpoint import Checkpoint
from lipbound.runs import store
from lipbound.runs.config import RunConfig

WRONG = {"None": None, "digits": "8", "text": "x", "empty": "", "bytes": b"x"}
WRONG |= {"fraction": 1.5, "nan": float("nan"), "inf": float("inf"), "negative": -3, "zero": 0}
WRONG |= {"flag": True, "list": [1.5], "dict": {}, "set": {1.5}, "array": np.array([1, 2])}
WRONG |= {"object": object(), "path": Path("x"), "function": print, "complex": 1j}
WRONG |= {"slice": slice(1)}
UNNAMED = set("of get at names for load prepare bounds".split())
ATT = random_attention("plain")


def each(name, call, *right):
    """A call with every wrong value but those that are right here. What the error must name is the
    last word of the name, but for those of `UNNAMED`."""
    return [
        (f"{name} {kind}", lambda value=value: call(value))
        for kind, value in WRONG.items()
        if kind not in right
    ]


def options(prefix, call, **right):
    """A call with every wrong value of some of its options, each with what is right for it."""
    return [
        case
        for name, fine in right.items()
        for case in each(f"{prefix}{name}", lambda v, name=name: call(**{name: v}), *fine.split())
    ]


def settings():
    """Arguments of compare, which all commands share; what is looked at later is not built for
    them."""
    plain = dict.fromkeys(("samples", "max_length", "tol", "bounds", "map", "norm", "dtype"), "")
    plain |= dict.fromkeys(("split", "column", "revision"), "None digits text")
    plain |= {"seed": "negative zero", "exact_samples": "None", "delta": "None", "resume": "flag"}
    plain |= {"layers": "None digits negative zero array", "out": "None digits text path"}
    return options("", partial(RunConfig, "m"), **plain, memory="digits fraction")


def layers():
    """Arguments of what takes an `Attention`."""
    plain = {name: getattr(ATT, name) for name in ("x", "w_q", "w_k", "w_v")}
    others = "b_q w_o mask valid sinks rotation norm_q norm_k".split()
    build = partial(lb.Attention, **plain)
    right = dict.fromkeys(plain, "") | dict.fromkeys(others, "None")
    found = options("", build, **right, scale="None fraction negative zero")
    tensors = {
        "whole numbers": torch.ones(2, 6, 9, dtype=torch.int64),
        "half": torch.ones(2, 6, 9).half(),
        "complex": 1j * torch.ones(2, 6, 9),
        "no axis": torch.tensor(1.0),
        "nothing": torch.zeros(0, 6, 9),
        "meta": torch.zeros(2, 6, 9, device="meta", dtype=torch.float64),
        "sparse": ATT.x.to_sparse(),
    }
    found += [(f"x {kind}", partial(build, x=tensor)) for kind, tensor in tensors.items()]
    yudin = lb.bounds.get("yudin")
    calls = {
        "norm of": lb.spectral_norm,
        "token of": lb.token_norm,
        "profile of": lb.token_profile,
        "bound of": yudin,
        "sound of": yudin.sound,
        "get": lb.bounds.get,
        "evaluate of": lambda v: lb.bounds.evaluate(v, "yudin"),
        "over_ball of": lambda v: lb.bounds.over_ball(v, 0.1),
        "whole_layer of": lambda v: lb.bounds.whole_layer(v, "yudin"),
        "attack of": lambda v: lb.attack(v, 0.1),
        "curve of": lambda v: lb.radius_curve(v, [0.1]),
    }
    for name, call in calls.items():
        found += each(name, call)
    found += each("evaluate names", partial(lb.bounds.evaluate, ATT), "empty")
    found += options("ball ", partial(lb.bounds.over_ball, ATT, 0.1), at="", ball="")
    found += options("layer ", partial(lb.bounds.whole_layer, ATT, "yudin"), rule="", map="")
    found += options("", partial(lb.attack, ATT), radius="fraction zero flag")
    of_norm = {"map": "", "tol": "fraction zero", "vectors": "flag"}
    found += options("token ", partial(lb.token_norm, ATT), **of_norm)
    of_norm |= {"method": "", "delta": "None", "seed": "negative zero", "max_steps": "None"}
    found += options("norm ", partial(lb.spectral_norm, ATT), **of_norm)
    of_attack = {"ball": "", "steps": "", "starts": "", "seed": "negative zero"}
    return found + options("attack ", partial(lb.attack, ATT, 0.1), **of_attack)


def models():
    """Arguments of what takes a model."""
    bert, ids = build(AFFINE["bert"]), {"input_ids": torch.arange(3, 9)[None]}
    beyond, whole = {"input_ids": torch.full((1, 4), 999)}, build(AFFINE["bert"])
    query = whole.encoder.layer[0].attention.self.query
    query.weight = torch.nn.Parameter((10 * query.weight).to(torch.int8), requires_grad=False)
    loaded = Checkpoint(bert, "bert", "", None)
    inputs = {
        "fractions": torch.ones(1, 4),
        "one axis": torch.arange(4),
        "long": torch.ones(1, 60, dtype=torch.long),
        "rows": [[1, 2]],
    }
    found = [
        (f"capture {name}", partial(lb.capture, bert, {"input_ids": value}))
        for name, value in inputs.items()
    ]
    found += [
        ("capture beyond", lambda: lb.capture(bert, beyond)),
        ("capture of other names", lambda: lb.capture(bert, {"foo": ids["input_ids"]})),
        ("capture whole numbers", lambda: lb.capture(whole, ids)),
        ("capture without weights", lambda: lb.capture(build(AFFINE["bert"]).to("meta"), ids)),
        ("model class", lambda: lb.load_checkpoint(type(bert))),
        ("load whole numbers", lambda: lb.load_checkpoint(whole)),
        ("network beyond", lambda: lb.network_norm(bert, beyond)),
        ("revision of a model", lambda: lb.load_checkpoint(bert, revision="v1")),
    ]
    found += each("capture of", lambda v: lb.capture(v, ids))
    found += each("capture inputs", partial(lb.capture, bert))
    found += options("capture ", partial(lb.capture, bert, ids), layers="None zero")
    found += each("load", lb.load_checkpoint, "text", "digits", "path")
    found += each("network of", lambda v: lb.network_norm(v, ids))
    found += each("network inputs", partial(lb.network_norm, bert))
    right = {"start": "zero", "end": "zero", "delta": "None", "batch": "", "seed": "negative zero"}
    found += options("network ", partial(lb.network_norm, bert, ids, end=1), **right)
    found += each("prepare for", lambda v: lb.prepare(v, ids))
    found += options("prepare ", partial(lb.prepare, loaded, ids), samples="")
    right_data = ("text", "digits", "path", "None", "array")
    return found + each("prepare", partial(lb.prepare, loaded), *right_data)


CASES = dict(settings() + layers() + models())


@pytest.mark.parametrize("start", sorted({name.split()[0] for name in CASES}))
def test_every_wrong_argument_is_refused_in_one_sentence(start):
    """By its first word, since a test for each of hundreds takes longer than they do."""
    wrong = {}
    for name in [name for name in CASES if name.split()[0] == start]:
        try:
            wrong[name] = f"returned {CASES[name]()!r}"[:200]
        except LipboundError as error:
            said, (*_, argument, kind) = str(error), name.split()
            named = kind not in WRONG or argument in UNNAMED or argument in said
            if not named or "\n" in said or not 10 < len(said) < 400 or " object at 0x" in said:
                wrong[name] = said
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    assert wrong == {}


BOUND = lb.bounds.get("yudin")
NEARLY = {
    "layers": [1, "1", "0-1", [0], (1,), range(2), np.array([0, 1]), torch.tensor([1]), -1],
    "device": ["cpu", torch.device("cpu")],
    "dtype": ["float32", torch.float32, np.float32, np.dtype("float32"), torch.float64],
    "samples": [2, np.int64(2), torch.tensor(2)],
    "bounds": ["yudin", ["yudin"], {"yudin"}, BOUND, [BOUND], (n for n in ["yudin"])],
    "tol": [0.5, np.float32(0.25), torch.tensor(0.5)],
    "memory": [1e9, "1e9", "4gb", "2 GiB", np.float64(1e9)],
}


def test_what_is_nearly_right_is_accepted(bert):
    for name, values in NEARLY.items():
        for value in values:
            found = getattr(RunConfig(str(bert), **{name: value}), name)
            assert isinstance(found, (int, float, str, tuple, torch.device)), (name, value)
    assert RunConfig("m", layers=3).layers == (3,)
    assert RunConfig("m", layers="0-3,7").layers == (0, 1, 2, 3, 7)


SENTENCE = "the ferry is in a clock"
QUICK = {"max_length": 12, "bounds": "castin", "progress": False}


@pytest.fixture(scope="module")
def one(bert):
    device = torch.device("cpu")
    return lb.compare(bert, SENTENCE, layers=1, device=device, dtype=torch.float32, **QUICK)


def test_data_that_is_nearly_right(bert, one):
    tokens = lb.load_checkpoint(bert).tokenizer()([SENTENCE])
    for given in (
        tokens,
        dict(tokens),
        {name: np.array(value) for name, value in tokens.items()},
        datasets.DatasetDict(extra=datasets.Dataset.from_dict({"text": [SENTENCE]})),
    ):
        ds = lb.compare(bert, given, layers=1, **QUICK)
        np.testing.assert_array_equal(ds["exact"], one["exact"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_loaded_model_in_another_dtype_is_measured_as_a_copy(dtype):
    model, options = build(AFFINE["bert"]).to(dtype), {"layers": 0, **QUICK}
    with pytest.warns(Notice, match="a copy of it in float32 is measured"):
        ds = lb.compare(model, inputs_for(model), **options)
    (note,) = ds.attrs["notes"]
    assert ("rounded; dtype='float64' keeps its numbers" in note) == (dtype == torch.float64)
    assert {p.dtype for p in model.parameters()} == {dtype}
    same = build(AFFINE["bert"]).to(dtype).float()
    expected = lb.compare(same, inputs_for(model), **options)
    np.testing.assert_array_equal(ds["exact"], expected["exact"])


def test_one_in_whole_and_half_precision_is_a_copy_too():
    model = build(AFFINE["bert"])
    model.encoder.layer[0].half()
    with pytest.warns(Notice, match="weights are in float16 and float32; a copy of it in float32"):
        assert len(lb.capture(model, inputs_for(model))) == 2


@pytest.fixture(scope="module")
def run():
    model = build(AFFINE["gpt2"])
    return lb.compare(model, inputs_for(model), bounds=["castin", "yudin"], progress=False)


def test_runs_are_taken_by_path_and_in_part(run, tmp_path):
    store.save(run, tmp_path / "run.zarr")
    assert lb.tables.summary(tmp_path / "run.zarr").equals(lb.tables.summary(run))
    assert lb.cite(str(tmp_path / "run.zarr")) == lb.cite(run)
    parts = [run.isel({axis: 0}) for axis in ("layer", "sample", "head")]
    for part in (*parts, run.transpose("head", "layer", "sample")):
        assert len(lb.tables.summary(part)) == 2
        rows = part.sizes.get("head", 1) * part.sizes.get("layer", 1)
        assert len(lb.tables.breakdown(part, "head")) == rows
    assert lb.tables.summary(parts[0]).equals(lb.tables.summary(run.isel(layer=[0])))
    assert lb.plots.heatmaps(parts[0], bounds=["yudin"]).axes


def test_notices_are_of_the_line_that_called(run, tmp_path):
    store.save(run * 2, tmp_path / "edited.zarr")
    with pytest.warns(Notice, match="only 1 of 2 samples are different") as told:
        lb.compare("builtin:gpt2", ["same", "same"], bounds="none", layers=[0], progress=False)
    with pytest.warns(DamagedRunWarning, match="was edited") as told_too:
        lb.tables.summary(tmp_path / "edited.zarr")
    assert {one.filename for one in [*told, *told_too]} == {__file__}


# -- messages: a call, and words that must occur ---------------------------------------------------


MISSPELT = {
    "samples": lambda ds: lb.compare([ATT], sample=1),
    "tol": lambda ds: lb.spectral_norm(ATT, tolerance=1),
    "mask": lambda ds: lb.Attention(ATT.x, ATT.w_q, ATT.w_k, ATT.w_v, masks=1),
    "every": lambda ds: lb.Monitor(torch.nn.Linear(1, 1), ATT.x, everys=1),
    "layers": lambda ds: lb.capture(torch.nn.Linear(1, 1), ATT.x, layer=0),
    "weights": lambda ds: lb.load_checkpoint("builtin:gpt2", weight="whole"),
    "places": lambda ds: lb.verify(ds, place=1),
    "limits": lambda ds: lb.plots.heatmap(ds, limit=(0, 1)),
    "columns": lambda ds: lb.plots.heatmaps(ds, column=1),
    "width": lambda ds: lb.tables.latex(ds, widths=80),
}
"""Calls with an option that is nearly the one of that name."""
LAYER = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
ONES = (torch.ones(1, 5, 8),) * 3
MESSAGES = [
    (
        lambda _: lb.compare("m", samples="8"),
        "'8'; it must be a whole number, at least 1, or 'all'",
    ),
    (lambda _: lb.compare("builtin:gpt2", client=3), "client is 3; give a dask.distributed.Client"),
    (lambda _: lb.compare("m", progress=3), "progress is 3; it must be True or False"),
    (lambda _: lb.compare("m", inputs="a.txt"), "inputs is 'a.txt'; give a tensor, several, or a"),
    *(
        (lambda ds, axis=axis: lb.tables.summary(ds.mean(axis)), f"it has no {axis}s any more")
        for axis in ("sample", "layer", "head")
    ),
    # a model that is one layer, and types of numbers, have no names
    (
        lambda _: lb.compare(LAYER, inputs=tuple(one * torch.nan for one in ONES)),
        "layer (the model itself): ",
    ),
    (lambda _: lb.compare(LAYER, inputs=ONES, layers=1), "the model has 1 attention layer, "),
    (lambda _: lb.compare(LAYER, dtype=torch.float16), "dtype is float16; allowed are"),
    (lambda _: lb.compare(LAYER), "; give inputs="),
    (lambda _: lb.spectral_norm(torch.eye(2)), "spectral_norm was given is of type Tensor; give"),
]


def test_messages_say_what_was_given(run):
    for call, words in MESSAGES:
        refused(lambda call=call: call(run), words)
    for meant, call in MISSPELT.items():
        words = "has no option '", f"did you mean '{meant}'"
        refused(lambda call=call: call(run), *words, error=UnknownNameError)


@pytest.mark.parametrize("path", [5, "", ["figure.pdf"]])
def test_what_is_no_path_is_refused(path, run):
    axes = lb.plots.by_layer(run)
    for write in (
        lambda: lb.plots.heatmaps(run, path),
        lambda: lb.plots.heatmap(run, path=path),
        lambda: lb.plots.ratios(run, path=path),
        lambda: lb.plots.by_layer(run, path=path, ax=axes),
        lambda: lb.plots.token_profile(lb.token_profile(ATT), path=path),
        lambda: lb.report(run, path),
        lambda: lb.save(run, path),
    ):
        refused(write, "path is ", "; give the name of a file, as '")


def test_what_is_no_run_is_refused(run):
    lost = run.mean("sample"), run.drop_attrs(), run["exact"], run.isel(sample=[])
    tables = lb.tables.summary, lb.tables.latex, lb.tables.bibtex
    for given in (*lost, *WRONG.values()):
        for use in (*tables, lb.plots.heatmaps, lb.cite, lb.verify):
            refused(lambda use=use, given=given: use(given))


def test_inputs_in_bfloat16_are_measured_as_they_are():
    """numpy, which hashes inputs, knows no such numbers."""
    model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    half, same = (
        lb.compare(model, inputs=given, bounds="none", progress=False) for given in (x, x.float())
    )
    np.testing.assert_array_equal(half["exact"], same["exact"])
    (att,) = lb.capture(model, x.float())
    wide = lb.spectral_norm(att, tol=1e-6).lower
    np.testing.assert_allclose(half["exact"][:, 0], wide, rtol=1e-3)


def test_what_is_missing_or_too_much_names_what_was_called():
    for given in ((), ("builtin:gpt2", "data", "more")):
        with pytest.raises(TypeError, match=r"^compare\(\) "):
            lb.compare(*given)
