"""Bad values of every option and broken files of every kind: one sentence and status 2 each, in the
words of the command line."""

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clumsy import mess
from support.commands import call
from support.versions import marked

from lipbound.models import checkpoint, loading
from lipbound.runs import plan, store

QUICK = "--data {text} --samples 1 --max-length 8 --bounds castin"
SHORT = "--max-length 12"
COUNT = "it must be a whole number, at least 1"
NUMBERS = "give numbers from 0, such as 3, or 0-3,7"
PROBABILITY = "it must be a probability between 0 and 1, or None for plain estimates"
SIZE = "it must be a size such as '4GB', a number of bytes, or 'auto'"
ONE_MODEL = "give a checkpoint directory, a GGUF file, a hub id (owner/name) or a builtin"

MODELS = {
    "compare": "missing argument",
    "compare ''": "model is empty; give a hub id",
    "compare ' '": "model is empty",
    "compare builtin:gpt3": "unknown builtin checkpoint 'gpt3'; did you mean 'gpt2'?",
    "compare builtin:": "unknown builtin checkpoint ''; allowed are gpt2, llama,",
    "compare builtin:GPT2": "did you mean 'gpt2'?",
    "compare builtin:gpt2@v1": "did you mean 'gpt2'?",
    "compare minilm": "did you mean 'builtin:minilm'?",
    "compare {mess}/othr": "there is no directory or file {mess}/othr; did you mean "
    "'{mess}/other'?",
    "compare {mess}/nowhere": f"there is no directory or file {{mess}}/nowhere; {ONE_MODEL}",
    "compare ./nowhere": f"there is no directory or file ./nowhere; {ONE_MODEL}",
    "compare a/b/c": "there is no directory or file a/b/c",
    "compare https://huggingface.co/owner/name": "there is no directory or file https:",
    "compare 'my model'": "neither a directory here nor a valid hub id; hub ids are owner/name",
    "compare owner/nothing": "owner/nothing is not in the local cache, and HF_HUB_OFFLINE "
    "forbids looking on the hub",
    "compare owner/nothing@v1": "at revision 'v1' is not in the local cache",
    "compare owner/nothing@v1 --revision v2": "two revisions were given",
    "compare {bert}/config.json": "is a file; give one GGUF file, or the directory "
    "that holds config.json",
    "compare {mess}/empty": "has no config.json",
    "compare {mess}/adapter": "/adapter names no model; give one, with adapter=",
    "compare {mess}/no-weights --max-length 12": "has no weights (model.safetensors or ",
    "compare {mess}/bad-config": "is not a valid JSON file",
    "compare {mess}/list-config": "could not be loaded: Unrecognized model",
    "compare {mess}/empty-config": "could not be loaded: Unrecognized model",
    "compare {mess}/unknown-type": "has model type `mystery` but ",
    "compare {mess}/odd-heads": "is not a multiple of the number of attention heads",
    "compare {mess}/other-shapes --max-length 12": "its weights have other shapes than "
    "its configuration says",
    "compare {mess}/truncated --max-length 12": "/truncated/model.safetensors is cut off, "
    "damaged or no safetensors file (",
    "compare {mess}/no-bytes --max-length 12": "/no-bytes/model.safetensors is cut off",
    "compare {mess}/missing --max-length 12": "do not fill its architecture: "
    "16 tensors are missing or of another shape",
    "compare {mess}/nan-weights --max-length 12": "have NaN or infinite numbers, in "
    "encoder.layer.1.attention.self.query.weight",
    "compare {mess}/whole-numbers --max-length 12": "are not all floating-point numbers, "
    "encoder.layer.0.attention.self.query.weight for one",
    "compare {mess}/pickled --max-length 12": "holds other things than weights, "
    "none of which were run",
    "compare {mess}/resnet --samples 1": "no attention that can be captured",
    f"compare {{mess}}/no-tokenizer {SHORT}": "has no files of its tokenizer (tokenizer.json or "
    "the like)",
    f"compare {{mess}}/bad-tokenizer {SHORT}": "has no usable tokenizer",
    "compare {mess}/no-processor --samples 1": "has no files of its image processor "
    "(preprocessor_config.json or the like)",
    f"compare {{mess}}/fewer-words --data {{text}} {SHORT}": "input_ids has the number 14; "
    "{mess}/fewer-words knows tokens 0 "
    "to 9",
    "compare {bert}@v1": "did you mean '{bert}'?",
    "compare {bert} --revision v1": "revisions are for hub models",
    "compare builtin:gpt2 --revision v1": "revisions are for hub models",
    "compare {bert} --revision ''": "revision is ''; give its name, or leave it out",
    "compare {bert} --weights disk": "unknown weights 'disk'; allowed are auto, layers, whole",
    "compare {bert} --weights ''": "unknown weights ''; allowed are",
}
NUMBERS_OF_COMPARE = {
    **{f"--samples {value}": f"samples is {value}; {COUNT}" for value in (0, -1, -99)},
    **{
        f"--samples {value}": f"samples is '{value}'; {COUNT}, or 'all'"
        for value in ("1.5", "many", "1e9", "nan")
    },
    "--samples ''": f"samples is ''; {COUNT}, or 'all'",
    "--samples": "option '--samples' requires an argument",
    **{f"--exact-samples {value}": f"exact_samples is {value}; {COUNT}" for value in (0, -3)},
    "--exact-samples x": "invalid value for '--exact-samples'",
    **{f"--max-length {value}": f"max_length is {value}; {COUNT}" for value in (0, -4)},
    "--max-length long": "invalid value for '--max-length'",
    "--max-length=12.5": "invalid value for '--max-length'",
    "--max-length 41": "max_length 41 exceeds the 40 positions of {bert}",
    **{
        f"--layers {value}": f"layers is '{value}'; {NUMBERS}"
        for value in ("a", "1-0", "0,,1", "0,", "1.0", "0..1", "all", "0-", "-1-1", "9" * 20)
    },
    "--layers ''": f"layers is ''; {NUMBERS}",
    f"{QUICK} --layers 9": "layers [9] do not exist: the model has 2 attention layers, numbered "
    "0 to 1",
    f"{QUICK} --layers=-9": "layers [-9] do not exist",
    f"{QUICK} --layers 1-3": "layers [2, 3] do not exist",
    **{
        f"--tol {value}": f"tol is {float(value)}; it must be between 0 and 1"
        for value in ("0", "1", "-1", "nan", "inf", "1e-400")
    },
    "--tol x": "invalid value for '--tol'",
    **{
        f"--delta {value}": f"delta is {float(value)}; {PROBABILITY}"
        for value in ("-1", "1", "2", "nan", "inf")
    },
    "--delta x": "invalid value for '--delta'",
    **{f"--seed {value}": "invalid value for '--seed'" for value in ("x", "1.5", "1e3")},
    **{
        f"--memory {value}": f"memory is '{value}'; {SIZE}"
        for value in ("-1", "much", "4XB", "nan", "inf", "50%")
    },
    "--memory ''": f"memory is ''; {SIZE}",
    "--memory 0": f"memory is 0.0; {SIZE}",
    "--memory 1e999": f"memory is inf; {SIZE}",
}
NAMES_OF_COMPARE = {
    "--bounds ''": "bounds is '', which names none; give 'default', 'all', a name",
    "--bounds ,": "bounds is ',', which names none",
    "--bounds yudn": "unknown bound 'yudn'; did you mean 'yudin'",
    "--bounds Yudin": "did you mean 'yudin'",
    "--bounds 'yudin kim'": "did you mean 'yudin'",
    "--bounds exact,yudin": "unknown bound 'exact'; allowed are castin,",
    "--bounds all,yudin": "unknown bound 'all'; allowed are",
    "--map heads2": "unknown map 'heads2'; did you mean 'heads'",
    "--map HEAD": "did you mean 'head'",
    "--map ''": "unknown map ''; allowed are head,",
    "--map layer --bounds kim": "has no value for map='layer'; use map='head' or leave it out",
    f"{QUICK} --map pre_norm": "map 'pre_norm' needs a layer that normalises before attention",
    **{
        f"--device {value}": f"device '{value}' cannot be used here; try 'cpu' or 'auto'"
        for value in ("gpu", "cuda:77", "meta", "mps", "xla")
    },
    "--device ''": "device is ''; give 'cpu', 'cuda', 'cuda:1' or 'auto'",
    **{
        f"--dtype {value}": f"dtype is '{value}'; allowed are 'float32' and 'float64'"
        for value in ("float16", "double", "32")
    },
    "--dtype ''": "dtype is ''; allowed are",
    **{
        f"--scheduler local:{value}": "the number of local processes must be at least 1, such as "
        "local:2"
        for value in ("0", "-1", "two", "")
    },
    "--scheduler nowhere": "no dask scheduler answers at 'nowhere'",
    "--resume": "resume needs out, the name of the run to take up",
    f"{QUICK} --out {{mess}}/file/run.zarr": "{mess}/file/run.zarr cannot be written",
    f"{QUICK} --out /proc/nothing/run.zarr": "/proc/nothing/run.zarr cannot be written",
    f"{QUICK} --out {{mess}}/run.zarr": "{mess}/run.zarr exists already; choose another name",
    f"{QUICK} --out /": "/ exists already",
    f"{QUICK} --out {{mess}}/run.zarr --resume": "belongs to another configuration: "
    "data_fingerprint was",
    f"{QUICK} --out {{mess}}/strange.zarr --resume": "{mess}/strange.zarr is not a run of lipbound",
    f"{QUICK} --out {{mess}}/file --resume": "{mess}/file is not a run of lipbound",
    "extra": "got unexpected extra argument",
    "--sampels 3": "no such option: --sampels; did you mean --samples?",
    "--no-such": "no such option: --no-such",
    "-x": "no such option: -x",
}
DATA = {
    "''": "data is empty; give a file, a folder, a hub dataset or a text",
    "' '": "data is empty",
    "{mess}/nowhere.txt": "there is no file or folder {mess}/nowhere.txt",
    "nowhere.csv": "there is no file or folder nowhere.csv",
    "{mess}/nowhere.safetensors": "there is no file {mess}/nowhere.safetensors",
    "'my letters.txt'": "there is no file or folder my letters.txt",
    "{mess}/empty.txt": "empty.txt has no text in it",
    "{mess}/latin.txt": "is not a UTF-8 text file",
    "{mess}/binary.bin": "is not a UTF-8 text file",
    "{mess}/picture.png": "is an image, but {bert} takes text",
    "{mess}/pictures": "{mess}/pictures holds no texts (.txt, .text), but {bert} takes text",
    "{mess}/empty": "could not be read, as a file or a hub dataset",
    "{mess}/empty.csv": "No columns to parse from file",
    "{mess}/header.csv": "could not be read, as a file or a hub dataset: it is empty",
    "{mess}/ragged.csv": "Expected 2 fields in line 3, saw 4",
    "{mess}/numbers.csv": "numbers.csv has no column of a usual name for text; name one of a, b "
    "with column=",
    "{mess}/numbers.csv --column a": "column 'a' of numbers.csv holds int, but {bert} takes "
    "text; name another with column=",
    "{mess}/numbers.csv --column c": "numbers.csv has no column 'c'; name one of a, b with column=",
    "{mess}/numbers.csv --column 7": "numbers.csv has no column '7'; name one of 0, 1 with column=",
    "{mess}/two.csv --column ''": "column is ''; give its name, or leave it out",
    "{mess}/two.csv --split test": "split is 'test', but there is none in two.csv, one file; "
    "drop it",
    "{mess}/blank.csv": "blank.csv has no text in it",
    "{mess}/broken.parquet": "could not be read, as a file or a hub dataset: Parquet magic bytes "
    "not found",
    "{mess}/empty.parquet": "empty.parquet' could not be read",
    "{mess}/broken.json": "broken.json' could not be read",
    "{mess}/numbers.json": "holds int, but {bert} takes text",
    "{mess}/empty.jsonl": "could not be read, as a file or a hub dataset: it is empty",
    "{text} --split train": "split is 'train', but there is none in text.txt; drop it",
    "{text} --column text": "column is 'text', but there is none in text.txt; drop it",
    "'the ferry is in a clock' --split train": "but there is none in the text 'the ",
    "{mess}/broken.safetensors": "is not a readable safetensors file",
    "{mess}/extra.safetensors --split train": "but there is none in ready inputs",
    "{mess}/keys.safetensors": "ready inputs of BertModel must have input_ids; given are foo",
    "{mess}/mask-alone.safetensors": "You must specify exactly one of input_ids",
    "{mess}/vocabulary.safetensors": "input_ids has the number 1400; {bert} knows tokens 0 to "
    "59; are they of its tokenizer?",
    "{mess}/negative.safetensors": "input_ids has the number -6",
    "{mess}/floats.safetensors": "input_ids is of torch.float32 and of shape (2, 6); it must be "
    "whole numbers (int64), (samples, tokens)",
    "{mess}/long.safetensors": "inputs of 50 tokens exceed the 40 positions of {bert}",
    "{mess}/one-axis.safetensors": "at least one; given are input_ids (5,)",
    "{mess}/three-axes.safetensors": "of shape (2, 2, 6); it must be whole numbers (int64), "
    "(samples, tokens)",
    "{mess}/no-tokens.safetensors": "of shape (2, 0); it must be whole numbers (int64), "
    "(samples, tokens), with at least one",
    "{mess}/mask.safetensors": "attention_mask has shape (2, 4) but input_ids (2, 6)",
    "{mess}/unequal.safetensors": "ready inputs must be named tensors of (samples, ...), all "
    "with as many samples, at least one; given are ",
    "{mess}/padding.safetensors": "attention_mask marks all of a sample as padding",
    "{mess}/types.safetensors": "BertModel cannot compute with these inputs: index out of range",
}
IMAGES = {
    "{text}": "is not an image file, but {vit} takes images",
    "{mess}/empty": "{mess}/empty holds no images (.png, .jpg, .jpeg, .webp, .bmp, .gif, .tif, "
    ".tiff), but {vit} takes images",
    "{mess}/no-pictures": "a.png is not a readable image",
    "{mess}/half-a-picture": "a.png is not a readable image",
    "{mess}/pictures --split train": "but there is none in pictures",
    "'a photograph of a cat'": "data is the text 'a photograph of a cat', but {vit} takes images",
    "{mess}/keys.safetensors": "ready inputs of ViTModel must have pixel_values; given are foo",
    "{mess}/channels.safetensors": "ViTModel cannot compute with these inputs: Make sure that the "
    "channel dimension",
    "{mess}/size.safetensors": "ViTModel cannot compute with these inputs: Input image size "
    "(32*32) doesn't match model (16*16)",
    "{mess}/bytes.safetensors": "pixel_values (torch.uint8) must be floating-point and finite",
    "{mess}/nan.safetensors": "pixel_values (torch.float32) must be floating-point and finite",
}
NO_RUN = "is not a run of lipbound"
RUN_COMMANDS = {
    **{
        f"{command} {{mess}}/nowhere.zarr {rest}": "there is no run {mess}/nowhere.zarr"
        for command, rest in (
            ("table", ""),
            ("cite", ""),
            ("verify", ""),
            ("report", "--no-details"),
            ("heatmap", "-o {tmp}/x.png"),
        )
    },
    **{
        f"{command} {{mess}}/{what} {rest}": NO_RUN
        for what in ("empty", "strange.zarr")
        for command, rest in (
            ("table", ""),
            ("cite", ""),
            ("verify", ""),
            ("heatmap", "-o {tmp}/x.png"),
        )
    },
    "table {mess}/foreign.zarr": "{mess}/foreign.zarr is not a run of lipbound",
    "table": "missing argument",
    "cite": "missing argument",
    "verify": "missing argument",
    "report": "missing argument",
    "heatmap {mess}/run.zarr": "missing option '-o' / '--output'",
    "heatmap {mess}/run.zarr -o {tmp}/new/x.png": "x.png cannot be written: there is no folder",
    "report {mess}/run.zarr -o {tmp}/new/x.html": "x.html cannot be written: there is no folder",
    "table {mess}/run.zarr --format latex --width 3": "width is 3.0; it must be a number of "
    "points, at least 120, or one of column, page, slide",
    "heatmap {mess}/run.zarr -o": "option '-o' requires an argument",
    "table {mess}/run.zarr --format pdf": "unknown format 'pdf'; allowed are",
    "table {mess}/run.zarr --by bounds": "unknown rows 'bounds'; did you mean 'bound'?",
    "table {mess}/run.zarr --bounds yudn": "unknown bound 'yudn'; did you mean 'yudin'",
    "table {mess}/run.zarr --bounds ''": "bounds is '', which names none",
    "table {mess}/run.zarr --bounds kim": "the run has no bound 'kim'; it has yudin, castin",
    "table {mess}/run.zarr --by head --reduce average": "unknown reduction 'average', and no "
    "quantile between 0 and 1; allowed are",
    **{
        f"table {{mess}}/run.zarr --by layer --reduce {value}": f"unknown reduction {value}, "
        "and no quantile between 0 and 1; allowed are"
        for value in ("2.0", "-1.0", "nan")
    },
    "table {mess}/run.zarr --by head --values ratios": "unknown values 'ratios'; did you mean "
    "'ratio'?",
    "cite {mess}/run.zarr --format apa": "unknown format 'apa'; allowed are bib, latex, natbib, "
    "text",
    "heatmap {mess}/run.zarr -o {tmp}/x.docx": "has no file type that can be drawn",
    "heatmap {mess}/run.zarr -o {mess}/file/x.pdf": "{mess}/file/x.pdf cannot be written",
    "heatmap {mess}/run.zarr -o {tmp}/x.png --columns 0": "columns is 0",
    "heatmap {mess}/run.zarr -o {tmp}/x.png --columns 1.5": "invalid value for '--columns'",
    "heatmap {mess}/run.zarr -o {tmp}/x.png --width tall": "width is 'tall'; it must be a number "
    "of inches, from 1 to 100, or one of page, column, slide",
    **{
        f"heatmap {{mess}}/run.zarr -o {{tmp}}/x.png --width {value}": f"width is {float(value)}; it "  # noqa: E501
        "must be a number of inches"
        for value in ("0", "-3", "nan", "inf", "1e9", "0.01")
    },
    "heatmap {mess}/run.zarr -o {tmp}/x.png --scale log": "unknown scale 'log'; allowed are",
    "heatmap {mess}/run.zarr -o {tmp}/x.png --bounds ''": "bounds is '', which names none",
    "heatmap {mess}/run.zarr -o {tmp}/x.png --reduce 1.5": "unknown reduction 1.5, and no "
    "quantile between 0 and 1; allowed are geomean, max, mean, median",
    "report {mess}/run.zarr -o {tmp}/x.pdf": "is not an .html file",
    "report {mess}/run.zarr -o {tmp}/x.html --sample 9": "sample is 9; the run has samples 0 to 1",
    "report {mess}/run.zarr {mess}/run.zarr -o {tmp}/x.html --model {bert}": "model= and data= are for a "  # noqa: E501
    "single run",
    **{
        f"verify {{mess}}/run.zarr --places {value}": f"places is {value}; {COUNT}"
        for value in (0, -1)
    },
    "verify {mess}/run.zarr --places x": "invalid value for '--places'",
    "verify {mess}/run.zarr --seed -1": "seed is -1; it must be a whole number, at least 0",
    "verify {mess}/run.zarr --model {mess}/nowhere": "there is no directory or file {mess}/nowhere",
    "verify {mess}/run.zarr --data {mess}/nowhere.txt": "there is no file or folder "
    "{mess}/nowhere.txt",
    "verify {mess}/run.zarr --data {mess}/picture.png": "is an image, but {bert} takes text",
    "verify {mess}/run.zarr --device gpu": "device 'gpu' cannot be used here",
    "verify {mess}/run.zarr --dtype half": "dtype is 'half'; allowed are",
    "verify {mess}/moved.zarr": "there is no directory or file {mess}/gone",
    "verify {mess}/memory.zarr": "in memory, which no name leads back to; give it as model=",
}
OTHER_COMMANDS = {
    "compair x": "no such command 'compair'",
    "COMPARE x": "no such command 'COMPARE'",
    "--samples 3": "no such option: --samples; see lipbound --help",
    "bounds yudin": "got unexpected extra argument",
    "bounds --layout x": "no such option: --layout",
    "sweep": "missing argument",
    "sweep {mess}/nowhere.yaml": "{mess}/nowhere.yaml cannot be read as YAML: No such file or "
    "directory",
    "sweep {mess}/empty": "cannot be read as YAML: Is a directory",
    "sweep {mess}/binary.bin": "cannot be read as YAML: 'utf-8' codec can't decode",
    "sweep {mess}/broken.yaml": "{mess}/broken.yaml cannot be read as YAML: line 1, ",
    "sweep {mess}/program.yaml": "cannot be read as YAML: line 1, could not determine a "
    "constructor",
    **{
        f"sweep {{mess}}/{name}.yaml": "is not a sweep; give a mapping with at least a model"
        for name in ("list", "nothing")
    },
    "sweep {mess}/no-model.yaml": "has no model for its runs; give one at least",
    "sweep {mess}/key.yaml": "has an unknown key 'sampels'; did you mean 'samples'",
    **{
        f"sweep {{mess}}/{name}.yaml --out {{tmp}}/s": "1 run of the sweep failed; "
        "{tmp}/s/index.csv says why"
        for name in ("samples", "tol", "delta", "length", "number", "mapping", "layers")
    },
    "sweep {mess}/good.yaml --out {mess}/file": "{mess}/file cannot be written",
    "demo --out {mess}/file": "{mess}/file exists already",
    "demo --samples 0 --out {tmp}/d": f"samples is 0; {COUNT}",
    "demo --samples x --out {tmp}/d": "invalid value for '--samples'",
}
CASES = (
    MODELS
    | {
        f"compare {{bert}} {options}": words
        for options, words in (NUMBERS_OF_COMPARE | NAMES_OF_COMPARE).items()
    }
    | {f"compare {{bert}} {SHORT} --data {data}": words for data, words in DATA.items()}
    | {f"compare {{vit}} --data {data}": words for data, words in IMAGES.items()}
    | RUN_COMMANDS
    | OTHER_COMMANDS
)


@pytest.fixture(scope="module")
def places(
    bert: Path, vit: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    folder = mess(tmp_path_factory.mktemp("mess"), bert, vit, text)
    yield {"bert": bert, "vit": vit, "text": text, "mess": folder}
    assert not [path for path in folder.iterdir() if "partial" in path.name], (
        "something unfinished was left behind"
    )
    assert store.load(folder / "run.zarr").sizes["sample"] == 2


@pytest.fixture(autouse=True)
def offline(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No network; good checkpoints are loaded once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    open_checkpoint, companion = loading.load_checkpoint, checkpoint.Checkpoint._companion

    def load(model: object, **options: object) -> object:
        good = (
            model in (str(places["bert"]), str(places["vit"]))
            and options["revision"] is None
            and options["weights"] == "auto"
        )
        key = (model, options["dtype"])
        if good and key not in LOADED:
            LOADED[key] = open_checkpoint(model, **options)
        return LOADED[key] if good else open_checkpoint(model, **options)

    def kept(self: checkpoint.Checkpoint, loader: type, *rest: object) -> object:
        if self not in LOADED.values():
            return companion(self, loader, *rest)
        return (
            LOADED.setdefault((self.source, loader), companion(self, loader, *rest))
            if (self.source, loader) not in LOADED
            else LOADED[self.source, loader]
        )

    monkeypatch.setattr(plan, "load_checkpoint", load)
    monkeypatch.setattr(checkpoint.Checkpoint, "_companion", kept)


LOADED: dict[object, object] = {}


def run(
    line: str,
    places: dict[str, Path],
    tmp: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, str, list[str]]:
    """Exit status, standard output, and the lines of standard error, of a command in a folder."""
    monkeypatch.chdir(tmp)
    status, out, err = call(capsys, monkeypatch, *shlex.split(line.format(tmp=tmp, **places)))
    return status, out, err.splitlines()


def test_there_are_enough() -> None:
    assert len(CASES) >= 200


OLD = "transformers fails otherwise"
LACKING = dict.fromkeys(("compare {mess}/list-config", "compare {mess}/empty-config"), OLD)
LACKING |= {"compare {mess}/pickled --max-length 12": "pickled weights need torch 2.6"}


@pytest.mark.parametrize("line", marked(CASES, LACKING))
def test_one_sentence_and_status_two(
    line: str,
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, _, err = run(line, places, tmp_path, capsys, monkeypatch)
    said = [one for one in err if not one.startswith("note: ")]
    assert (status, len(said)) == (2, 1), err
    assert said[0].startswith("error: ")
    assert CASES[line].format(tmp=tmp_path, **places) in said[0]
    assert not set(os.listdir(tmp_path)) - {"r", "s"}, "something was written"


TOLD = {
    "compare {bert} --data {text} --max-length 11 --samples 99 --bounds castin --layers 0": "note: 99 samples were asked "  # noqa: E501
    "for, and text.txt gives",
    f"compare {{bert}} {QUICK} --layers=-1": "note: layers below zero count from the end: here 1",
    f"compare {{bert}} {QUICK} --exact-samples 5": "note: exact norms of 5 samples were asked for",
    "compare {bert} --data {mess}/extra.safetensors --samples 2 --bounds castin": "note: colour is not an input "  # noqa: E501
    "of BertModel and was left out",
}


@pytest.mark.parametrize("line", TOLD)
def test_what_is_done_otherwise_is_told(
    line: str,
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On standard error and in the run, and with --quiet in the run alone."""
    status, _, err = run(f"{line} --out {{tmp}}/run.zarr", places, tmp_path, capsys, monkeypatch)
    assert (status, err) == (0, [err[0]]), err
    assert err[0].startswith(TOLD[line])
    (note,) = store.load(tmp_path / "run.zarr").attrs["notes"]
    assert err[0] == f"note: {note}"
    assert run(f"{line} --quiet", places, tmp_path, capsys, monkeypatch)[2] == []


DONE = {
    "compare {bert} --data 'the ferry is in a clock' --max-length 12 --bounds castin": "exact norms: 8 (2 layers x 4 "  # noqa: E501
    "heads, 1 sample)",
    f"compare {{bert}} {QUICK} --layers 0-1": "exact norms: 8 (2 layers x 4 heads, 1 sample)",
    f"compare {{bert}} {QUICK} --memory 1e9 --dtype torch.float32 --layers 0": "exact norms: 4 (layer 0 of 2 counted from 0, "  # noqa: E501
    "4 heads, 1 sample)",
    f"--quiet compare {{bert}} {QUICK} --layers 0 --verbose": "exact norms: 4 (layer 0 of 2 counted from 0, 4 "  # noqa: E501
    "heads, 1 sample)",
}


@pytest.mark.parametrize("line", DONE)
def test_what_is_nearly_right_is_done(
    line: str,
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, out, err = run(line, places, tmp_path, capsys, monkeypatch)
    assert (status, err) == (0, [])
    assert DONE[line] in out
    assert "LIPBOUND_VERBOSE" not in os.environ


def test_other_libraries_are_silent_unless_asked(
    places: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ragged = "compare {bert} --max-length 12 --data {mess}/numbers.csv"
    digest = hashlib.sha256((places["mess"] / "numbers.csv").read_bytes())
    assert len(run(ragged, places, tmp_path, capsys, monkeypatch)[2]) == 1
    # not in the cache of datasets
    (places["mess"] / "loud.csv").write_text(f"a,b\n{digest.hexdigest()},2\n")
    loud = run(
        "compare {bert} --max-length 12 --data {mess}/loud.csv --verbose",
        places,
        tmp_path,
        capsys,
        monkeypatch,
    )[2]
    assert any("examples" in line for line in loud)
