"""Bad values of every option and broken files of every kind: one sentence and status 2 each, in the
words of the command line."""

import functools
import hashlib
import itertools
import os
import re

import pytest
from support.clumsy import mess
from support.commands import command
from support.versions import marked

from lipbound.models import checkpoint, loading
from lipbound.runs import compare, store

TABLE = """
<compare|table|cite|verify|report|sweep> => issing argument
compare <''|' '> => model is empty
compare <builtin:gpt3|builtin:GPT2|builtin:gpt2@v1> => did you mean 'gpt2'?
compare minilm => did you mean 'builtin:minilm'?
compare builtin: => unknown builtin checkpoint ''; allowed are gpt2, llama,
compare {mess}/othr => there is no directory or file {mess}/othr; give a checkpoint directory
compare <{mess}/nowhere|./nowhere> => nowhere; give a checkpoint directory, a GGUF file, a hub id
compare a/b/c => there is no directory or file a/b/c
compare https://huggingface.co/owner/name => there is no directory or file https:
compare 'my model' => neither a directory nor a hub id; hub ids are owner/name
compare owner/nothing => not in the local cache, and HF_HUB_OFFLINE forbids looking on the hub
compare owner/nothing@v1 => at revision 'v1' is not in the local cache
compare owner/nothing@v1 --revision v2 => two revisions were given
compare {bert}/config.json => is a file; give one GGUF file, or the directory that holds config.json
compare {mess}/empty => has no config.json
compare {mess}/adapter => /adapter names no model; give one, with adapter=
compare {mess}/no-weights --max-length 12 => has no weights (model.safetensors or
compare {mess}/bad-config => is not a valid JSON file
compare <{mess}/list-config|{mess}/empty-config> => could not be loaded: Unrecognized model
compare {mess}/unknown-type => has model type `mystery` but
compare {mess}/odd-heads => is not a multiple of the number of attention heads
compare {mess}/resnet --samples 1 => no attention that can be captured
compare {mess}/no-tokenizer --max-length 12 => has no files of its tokenizer
compare {mess}/bad-tokenizer --max-length 12 => has no usable tokenizer
compare {mess}/no-processor --samples 1 => has no files of its image processor
compare {mess}/fewer-words --data {text} --max-length 12 => has the number 14; {mess}/fewer-words
compare {bert}@v1 => there is no directory or file {bert}@v1; give a checkpoint directory
compare <{bert}|builtin:gpt2> --revision v1 => revisions are for hub models
compare {bert} --revision '' => revision is ''; give its name, or leave it out
compare {bert} --samples <0|-1|-99|1.5|many|1e9|nan|''> => a whole number, at least 1, or 'all'
compare {bert} <--exact-samples|--max-length> <0|-4> => ; it must be a whole number, at least 1
<verify {run} --places|demo --out {tmp}/d --samples> 0 => must be a whole number, at least 1
compare {bert} <--exact-samples|--max-length|--tol|--delta|--seed> x => nvalid value for '--
compare {bert} <--max-length=12.5|--seed 1.5|--seed 1e3> => nvalid value for '--
<verify {run} --places|demo --out {tmp}/d --samples> x => nvalid value for '--
compare {bert} --max-length 41 => max_length 41 exceeds the 40 positions of {bert}
compare {bert} --layers <a|1-0|0,,1|0,|1.0|0..1|all|0-|-1-1|9999999999|''> => give numbers from 0
compare {bert} <--samples|--exact-samples|--tol> => requires an argument
compare {bert} --bounds <''|,> => which names none; give 'default', 'all', a name
compare {bert} --bounds <exact,yudin|all,yudin> => ; allowed are castin,
compare {bert} {quick} --map pre_norm => needs a layer that normalises before attention
<compare {bert}|verify {run}> --device <gpu|cuda:77|meta|mps|xla> => ' cannot be used here; try
compare {bert} --device '' => device is ''; give 'cpu', 'cuda', 'cuda:1' or 'auto'
<compare {bert}|verify {run}> --dtype <float16|double|32|half> => ; allowed are 'float32' and
compare {bert} --scheduler local:<0|-1|two|''> => processes must be at least 1, as in local:2
compare {bert} --scheduler nowhere => no dask scheduler answers at 'nowhere'
compare {bert} {quick} --out <{mess}/file|/proc/nothing>/run.zarr => /run.zarr cannot be written
compare {bert} {quick} --out {mess}/run.zarr => run.zarr exists already; choose another name
compare {bert} {quick} --out {mess}/run.zarr --resume => another configuration: data_fingerprint was
compare {bert} {quick} --out {mess}/<strange.zarr|file> --resume => is not a run of lipbound
compare {bert} extra => unexpected extra argument
compare {bert} <--no-such|-x> => o such option: -
compare {bert} {data} <''|' '> => data is empty
compare {bert} {data} <{mess}/nowhere.txt|nowhere.csv|'my letters.txt'> => there is no file or
compare {bert} {data} {mess}/nowhere.safetensors => there is no file {mess}/nowhere.safetensors
compare {bert} {data} {mess}/empty.txt => empty.txt has no text in it
compare {bert} {data} {mess}/<latin.txt|binary.bin> => is no UTF-8 text file
<compare {bert} {data}|verify {run} --data> {mess}/picture.png => is an image, but {bert} takes text
compare {bert} {data} {mess}/pictures => /pictures holds no texts (.txt, .text), but {bert}
compare {bert} {data} {mess}/<empty|empty.csv|header.csv|ragged.csv|broken.json> => {mess}
compare {bert} {data} {mess}/<empty.parquet|empty.jsonl|broken.parquet> => {mess}
compare {bert} {data} {mess}/numbers.csv => numbers.csv has no column of a usual name for text
compare {bert} {data} {mess}/numbers.csv --column a => column 'a' of numbers.csv holds
compare {bert} {data} {mess}/numbers.csv --column <c|7> => numbers.csv has no column
compare {bert} {data} {mess}/two.csv --column '' => column is ''; give its name, or leave it out
compare {bert} {data} {mess}/two.csv --split test => split is 'test', but there is none in two.csv
compare {bert} {data} {mess}/blank.csv => blank.csv has no text in it
compare {bert} {data} {mess}/numbers.json => but {bert} takes text
compare {bert} {data} 'the ferry is in a clock' --split train => there is none in the text 'the
compare {bert} {data} {mess}/broken.safetensors => is not a readable safetensors file
compare {bert} {data} {mess}/keys.safetensors => must have input_ids; given are foo
compare {bert} {data} {mess}/mask-alone.safetensors => You must specify exactly one of input_ids
compare {bert} {data} {mess}/vocabulary.safetensors => {bert} knows tokens 0 to 59
compare {bert} {data} {mess}/negative.safetensors => input_ids has the number -6
compare {bert} {data} {mess}/floats.safetensors => of torch.float32 and of shape (2, 6); it must be
compare {bert} {data} {mess}/long.safetensors => of 50 tokens exceed the 40 positions of
compare {bert} {data} {mess}/one-axis.safetensors => at least one; given are input_ids (5,)
compare {bert} {data} {mess}/three-axes.safetensors => (2, 2, 6); it must be whole numbers (int64)
compare {bert} {data} {mess}/no-tokens.safetensors => of shape (2, 0); it must be whole numbers
compare {bert} {data} {mess}/mask.safetensors => has shape (2, 4) but input_ids (2, 6)
compare {bert} {data} {mess}/unequal.safetensors => ready inputs must be named tensors of (samples,
compare {bert} {data} {mess}/padding.safetensors => attention_mask marks all of a sample as padding
compare {bert} {data} {mess}/types.safetensors => with these inputs: index out of range
compare {vit} --data {text} => is not an image file, but {vit} takes images
compare {vit} --data {mess}/<no-pictures|half-a-picture> => a.png is not a readable image
compare {vit} --data {mess}/empty => {mess}/empty holds no images (.png, .jpg,
compare {vit} --data 'a photograph of a cat' => a cat', but {vit} takes images
compare {vit} --data {mess}/channels.safetensors => Make sure that the channel dimension
compare {vit} --data {mess}/size.safetensors => Input image size (32*32) doesn't match model (16*16)
compare {vit} --data {mess}/<bytes|nan>.safetensors => must be floating-point and finite
<table|cite|verify|report --no-details|{draw}> {mess}/nowhere.zarr => there is no run {mess}/nowhere
<table|cite|verify|{draw}> {mess}/<empty|strange.zarr> => is not a run of lipbound
heatmap {run} => issing option '-o' / '--output'
heatmap {run} -o => ption '-o' requires an argument
<heatmap {run} -o {tmp}/new/x.png|report {run} -o {tmp}/new/x.html> => there is no folder
<table {run}|{draw} {run}> --bounds '' => bounds is '', which names none
cite {run} --format apa => unknown format 'apa'; allowed are bib, latex, natbib, text
heatmap {run} -o {mess}/file/x.pdf => {mess}/file/x.pdf cannot be written
{draw} {run} --columns 0 => columns is 0
{draw} {run} --columns 1.5 => nvalid value for '--columns'
verify {mess}/moved.zarr => there is no directory or file {mess}/gone
<compair|COMPARE> x => o such command '
--samples 3 => o such option: --samples; see lipbound --help
bounds --layout x => o such option: --layout
sweep {mess}/nowhere.yaml => cannot be read as YAML: No such file or directory
sweep {mess}/empty => cannot be read as YAML: Is a directory
sweep {mess}/binary.bin => cannot be read as YAML: 'utf-8' codec can't decode
sweep {mess}/<broken|program>.yaml => cannot be read as YAML: line 1,
sweep {mess}/<samples|tol|delta|length|number|mapping|layers>.yaml --out {tmp}/s => 1 run of the
sweep {mess}/good.yaml --out {mess}/file => {mess}/file cannot be written
demo --out {mess}/file => {mess}/file exists already
"""
"""A command in every line, with alternatives, and words that must occur in its error."""
SHORT = {
    "quick": "--data {text} --samples 1 --max-length 8 --bounds castin",
    "data": "--max-length 12 --data",
    "castin": "--bounds castin",
    "draw": "heatmap -o {tmp}/x.png",
    "run": "{mess}/run.zarr",
}


def cases(table):
    """Commands of a table, each with one of the alternatives, and their words."""
    for row in table.strip().splitlines():
        line, _, words = row.partition(" => ")
        parts = [part.split("|") for part in re.split("[<>]", line)]
        for chosen in itertools.product(*parts):
            line = "".join(chosen)
            for name, text in SHORT.items():
                line = line.replace(f"{{{name}}}", text)
            yield line, words


CASES = dict(cases(TABLE))
OLD = "transformers fails otherwise"
LACKING = dict.fromkeys(("compare {mess}/list-config", "compare {mess}/empty-config"), OLD)


@pytest.fixture(scope="module")
def places(bert, vit, text, tmp_path_factory):
    folder = mess(tmp_path_factory.mktemp("mess"), bert, vit, text)
    yield {"bert": bert, "vit": vit, "text": text, "mess": folder}
    left = [path for path in folder.iterdir() if "partial" in path.name]
    assert not left, "something unfinished was left behind"
    assert store.load(folder / "run.zarr").sizes["sample"] == 2


LOADED = functools.cache(loading.load_checkpoint)
COMPANIONS: dict[object, object] = {}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network; what can be loaded is loaded once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(compare, "load_checkpoint", LOADED)
    find = checkpoint.Checkpoint._companion

    def kept(self, *words):
        if (id(self), *words) not in COMPANIONS:
            COMPANIONS[id(self), *words] = find(self, *words)
        return COMPANIONS[id(self), *words]

    monkeypatch.setattr(checkpoint.Checkpoint, "_companion", kept)


@pytest.fixture
def run(places, tmp_path, monkeypatch):
    """Does a command in a folder of its own: status, standard output, lines of standard error."""
    monkeypatch.chdir(tmp_path)

    def done(line):
        status, out, err = command(line.format(tmp=tmp_path, **places))
        return status, out, err.splitlines()

    return done


@pytest.mark.parametrize("line", marked(CASES, LACKING))
def test_one_sentence_and_status_two(line, places, tmp_path, run):
    status, _, err = run(line)
    said = [one for one in err if not one.startswith("note: ")]
    assert (status, len(said)) == (2, 1), err
    assert said[0].startswith("error: ")
    assert CASES[line].format(tmp=tmp_path, **places) in said[0]
    assert not set(os.listdir(tmp_path)) - {"r", "s"}, "something was written"


OTHERWISE = """
compare {bert} --data {text} --max-length 11 --samples 99 {castin} => 99 samples were asked for, and
compare {bert} {quick} --layers=-1 => layers below zero count from the end: he
compare {bert} {quick} --exact-samples 5 => exact norms of 5 samples were asked
compare {bert} --data {mess}/extra.safetensors --samples 2 {castin} => colour is not an input of Ber
"""
NEARLY_RIGHT = """
compare {bert} {data} 'the ferry is in a clock' {castin} => norms: 8 (2 layers x 4 heads, 1 sample)
compare {bert} {quick} --layers 0-1 => norms: 8 (2 layers x 4 heads, 1 sample)
--quiet compare {bert} {quick} --memory 1e9 --layers 0 --verbose => norms: 4 (layer 0 of 2 counted f
"""
"""What is done all the same, with words of the note, and of what is printed."""


@pytest.mark.parametrize(("line", "words"), list(cases(OTHERWISE)))
def test_what_is_done_otherwise_is_told(line, words, tmp_path, run):
    """On standard error and in the run, and with --quiet in the run alone."""
    status, _, err = run(f"{line} --out {{tmp}}/run.zarr")
    assert (status, err) == (0, [err[0]]), err
    assert err[0].startswith(f"note: {words}")
    (note,) = store.load(tmp_path / "run.zarr").attrs["notes"]
    assert err[0] == f"note: {note}"
    assert run(f"{line} --quiet")[2] == []


@pytest.mark.parametrize(("line", "words"), list(cases(NEARLY_RIGHT)))
def test_what_is_nearly_right_is_done(line, words, run):
    status, out, err = run(line)
    assert (status, err) == (0, [])
    assert words in out
    assert "LIPBOUND_VERBOSE" not in os.environ


def test_other_libraries_are_silent_unless_asked(places, run):
    digest = hashlib.sha256((places["mess"] / "numbers.csv").read_bytes())
    assert len(run("compare {bert} --max-length 12 --data {mess}/numbers.csv")[2]) == 1
    # not in the cache of datasets
    (places["mess"] / "loud.csv").write_text(f"a,b\n{digest.hexdigest()},2\n")
    loud = run("compare {bert} --max-length 12 --data {mess}/loud.csv --verbose")[2]
    assert any("examples" in line for line in loud)
