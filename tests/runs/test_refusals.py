"""What runs refuse before anything is computed: what was given, and words of the one sentence."""

import pytest
import torch
from support.commands import refused
from support.models import GPT2, build
from transformers import GPT2Config, GPT2Model

import lipbound as lb
from lipbound.runs.config import RunConfig
from lipbound.runs.sweep import planned_runs, sweep

CONFIGURATIONS = [
    ({"bounds": "yudn"}, "did you mean"),
    ({"map": "layers"}, "did you mean 'layer'"),
    ({"map": "layer", "bounds": "kim"}, "use map='head' or leave it out"),
    ({"resume": True}, "needs out"),
    *(({"memory": size}, "4GB") for size in ("much", 0, -1, "4XB")),
    ({"norm": "every-tokn"}, "did you mean 'every-token'"),
    ({"norm": "every-token", "bounds": "yudin"}, "'yudin' is stated in the frobenius norm and"),
    ({"bounds": ["yudin", "lipbound_one"]}, "'lipbound_one' is stated in the one-token norm"),
    ({"norm": "one-token", "map": "residual"}, "take one of head, head_out, heads, layer"),
    ({"norm": "every-token", "delta": 1e-3}, "0.001, which norm='every-token' does not take"),
    ({"norm": "one-token", "seed": 1}, "seed is 1, which norm='one-token' does not take"),
    ({"wrt": "key"}, "unknown wrt 'key'; did you mean 'keys'"),
    ({"wrt": "keys", "map": "layer"}, "is of one head, and map 'layer' of a whole layer"),
    ({"wrt": "values", "bounds": "yudin"}, "'yudin' is stated for heads as functions of"),
    ({"wrt": "keys", "norm": "one-token"}, "has exact norms for norm='frobenius' alone"),
    ({"extras": "frob"}, "unknown extra 'frob'; did you mean 'frobenius'"),
    ({"extras": "frobenius", "norm": "one-token"}, "extras are of norm='frobenius'"),
    *((given, "'qk_clip' and tau, ") for given in ({"extras": "qk_clip"}, {"tau": 3})),
    ({"extras": "qk_clip", "tau": 0}, "tau is 0; it must be a logit above 0"),
    ({"extras": "row_norm", "map": "layer"}, "is of single heads"),
    ({"extras": "frobenius", "map": "residual"}, "extras are of norm='frobenius'"),
]
MONITORS = [
    ({"every": 2, "steps": [1]}, "every and steps are both given"),
    ({"steps": []}, "steps is empty; give steps"),
    ({"steps": [0, -1]}, "steps is -1; it must be a whole number, at least 0"),
    ({"log": 3}, "log is 3; give a function"),
    ({"threshold": {"exakt": 1}}, "unknown threshold of 'exakt'; did you mean 'exact'"),
    ({"threshold": "x"}, "threshold is 'x'; it must be a finite number"),
]
SWEEPS = [
    ("pairs: x", "no list of mappings"),
    ("pairs: []", "no list of mappings"),
    ("pairs: [{data: x}, {model: m}]", "no model for {'data': 'x'}"),
    ("pairs: [{model: m, sample: 3}]", "did you mean 'samples'"),
    ("pairs: [{model: m, pairs: []}]", "unknown key 'pairs'"),
    ("model: [", "cannot be read as YAML"),
    ("- a\n- b", "is not a sweep"),
    ("data: x", "has no model for its runs"),
    ("model: m\nsample: 3", "'samples'"),
    ("model: m\nresume: true\n", "unknown key 'resume'"),
    ("model: m\nseed: []\n", "empty list of seed; give a value at least"),
]


@pytest.mark.parametrize(("options", "words"), CONFIGURATIONS)
def test_options_of_a_run(options, words):
    refused(lambda: RunConfig("m", **options), words)


@pytest.mark.parametrize(("options", "words"), MONITORS)
def test_a_monitor(options, words):
    model = build(lambda: GPT2Model(GPT2Config(**GPT2)))
    refused(lambda: lb.Monitor(model, torch.tensor([[1, 2, 3]]), **options), words)


@pytest.mark.parametrize(("content", "words"), SWEEPS)
def test_a_sweep(content, words, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    refused(lambda: planned_runs(file), words)


def test_a_sweep_without_a_file(tmp_path):
    what = {"model": "m"}
    refused(lambda: sweep(what, tmp_path), "path is {'model': 'm'}; give the name of a YAM")
