"""GGUF files: the numbers that they stand for, how they are chosen, what is recorded, what is
refused."""

import shutil
import struct
from functools import partial

import gguf
import pytest
import torch
from support.checks import close, refused
from support.gguf_files import LETTERS, WORDS, Kind, llama, save_gguf, written
from support.models import save_bert
from support.oracles import capture_error
from support.versions import marked, newer_transformers
from transformers import modeling_gguf_pytorch_utils as reader

import lipbound as lb
from lipbound import devices
from lipbound.errors import CheckpointError
from lipbound.models import weight_files
from lipbound.models.capture.capture import Capturer
from lipbound.models.catalogue import describe

SMALL = {"data": "the ferry", "max_length": 6, "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One that holds a small GGUF file, model.gguf."""
    made = tmp_path_factory.mktemp("gguf")
    save_gguf(made / "model.gguf")
    return made


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F16])
def test_weights_are_those_that_the_file_stands_for(kind, tmp_path):
    """And transformers, which reads it, is left as it was."""
    expected = save_gguf(tmp_path / "model.gguf", kind=kind)
    before = gguf.GGUFReader, gguf.get_tensor_name_map, reader.tqdm
    checkpoint = lb.load_checkpoint(tmp_path / "model.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, reader.tqdm) == before
    close(checkpoint.model.state_dict(), expected, 0)
    assert checkpoint.quantization.startswith(f"GGUF {kind.name} (")
    assert "5 F32" in checkpoint.quantization


@newer_transformers("weights are not left on disk")
def test_weights_may_stay_in_the_file(tmp_path):
    expected = save_gguf(tmp_path / "model.gguf")
    checkpoint = lb.load_checkpoint(tmp_path / "model.gguf", weights="layers")
    assert weight_files.is_offloaded(checkpoint.model)
    words = weight_files.gguf_of(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"]
    assert len(words.parts) < len(words.data) == checkpoint.config.vocab_size  # are not read
    with weight_files.resident(checkpoint.model):
        close(checkpoint.model.state_dict(), expected, 0)


@newer_transformers("weights are not left on disk")
def test_weights_that_are_not_found_one_by_one_ask_for_the_whole(folder, monkeypatch):
    """As experts are, which a file stores together."""
    every = weight_files.gguf_tensors
    monkeypatch.setattr(
        weight_files, "gguf_tensors", lambda *given: dict([*every(*given).items()][1:])
    )
    whole = "could not be loaded: its weights are stored in another form, .* use weights='whole'"
    with pytest.raises(CheckpointError, match=whole):
        lb.load_checkpoint(folder, weights="layers")


def test_a_run_on_a_file_is_that_on_its_weights(folder, tmp_path):
    model = llama()
    model.load_state_dict(save_gguf(tmp_path / "again.gguf"))
    ids = lb.load_checkpoint(folder).tokenizer()("the ferry", return_tensors="pt").input_ids
    plain, packed = (
        lb.compare(one, {"input_ids": ids}, bounds=["lipbound"], progress=False)
        for one in (model, folder / "model.gguf")
    )
    torch.testing.assert_close(
        torch.tensor(packed["exact"].values), torch.tensor(plain["exact"].values), rtol=1e-6, atol=0
    )
    assert packed.attrs["quantization"] == "GGUF Q4_1 (14 tensors Q4_1, 5 F32, 1 Q8_0)"
    assert "quantization" not in plain.attrs


@newer_transformers("tokenizers of GGUF files begin with another token")
def test_the_tokenizer_is_the_files(folder):
    tokenizer = lb.load_checkpoint(folder).tokenizer()
    space = LETTERS.index("Ġ") + 2
    the, ferr, y = map(WORDS.index, ("the", "ferr", "y"))
    assert tokenizer("the ferry").input_ids == [the, space, ferr, y]


def test_a_run_says_how_weights_were_stored_and_is_verified(folder, tmp_path):
    options = {"gguf_file": "model.gguf", "bounds": ["yudin"], "out": tmp_path / "run.zarr"}
    ds = lb.compare(folder, **SMALL, **options)
    assert "GGUF Q4_1, sha256:" in lb.plots.caption(ds)
    assert "stored as GGUF Q4_1 (14 tensors Q4_1, 5 F32, 1 Q8_0)" in lb.tables.methods(ds, "text")
    shutil.copy(folder / "model.gguf", tmp_path / "other.gguf")
    assert lb.verify(tmp_path / "run.zarr").ok
    assert lb.verify(ds, model=tmp_path / "other.gguf").ok
    save_gguf(tmp_path / "other.gguf", kind=Kind.Q8_0)
    found = lb.verify(ds, model=tmp_path / "other.gguf")
    assert any("not the recorded model" in said for said in found.problems)


def test_files_are_chosen_by_name_where_there_are_several(folder, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "model.gguf", tmp_path / name)
    for model, wanted, words in (
        (tmp_path, None, "several GGUF files; name one with gguf_file=: 'a.gguf', 'b.gguf'"),
        (tmp_path, "c.gguf", "has no GGUF file c.gguf; name one with gguf_file=: 'a.gguf', 'b"),
        (tmp_path / "a.gguf", "b.gguf", "gguf_file is 'b.gguf'; give one GGUF file"),
    ):
        refused(lambda m=model, w=wanted: lb.load_checkpoint(m, gguf_file=w), words)
    assert lb.load_checkpoint(tmp_path, gguf_file="b.gguf").gguf_file == "b.gguf"
    save_bert(tmp_path)
    assert lb.load_checkpoint(tmp_path).quantization is None
    assert lb.load_checkpoint(tmp_path, gguf_file="a.gguf").quantization is not None


def test_what_cannot_be_read_is_refused_in_a_sentence(folder, tmp_path, monkeypatch):
    file, piece = tmp_path / "model.gguf", tmp_path / "piece.gguf"
    save_gguf(file, arch="rwkv7")
    writer = gguf.GGUFWriter(piece, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", torch.zeros(2, 32).numpy())
    written(writer)
    for model, options, words in (
        ("nowhere.gguf", {}, "there is no directory or file nowhere.gguf"),
        (file, {}, "architecture rwkv7 is not supported"),
        (piece, {}, "one of 3 pieces"),
        (folder, {"revision": "main"}, "revisions are for hub models"),
        ("builtin:gpt2", {"gguf_file": "a.gguf"}, "was given for the builtin checkpoint"),
        (llama(), {"gguf_file": "a.gguf"}, "was given for a model in memory"),
    ):
        refused(lambda m=model, o=options: lb.load_checkpoint(m, **o), words, error=CheckpointError)
    save_gguf(file, tokenizer=False)
    refused(lambda: lb.load_checkpoint(file).tokenizer(), "has no usable tokenizer")
    with monkeypatch.context() as small:
        small.setattr(devices, "available", lambda device: 0.0)
        whole = lambda: lb.load_checkpoint(folder, weights="whole")  # noqa: E731
        refused(whole, "the weights of ", " take memory in float32", "use weights='layers'")
    monkeypatch.setattr(weight_files, "find_spec", lambda name: None)
    words = "the package gguf and accelerate; pip install 'lipbound[gguf]'"
    refused(lambda: lb.load_checkpoint(folder), words)


HEAD = b"GGUF" + struct.pack("<I", 3)
WHOLE = r"is cut off, damaged or no GGUF file of a known version \({}\); fetch it again$"
SHORT = WHOLE.format(r"it has \d+ bytes and announces \d+ or more")
ZERO = r"transformers fails on it \(ZeroDivisionError|are not positive|has 0|0 heads"


def counts(tensors, fields):
    return HEAD + struct.pack("<QQ", tensors, fields)


def field(kind, *rest, name=b"a.b"):
    """The name of an entry, its type, the type of what is in an array, and how many there are."""
    kinds = struct.pack(f"<{len(rest)}I", kind, *rest[:-1])
    return struct.pack("<Q", len(name)) + name + kinds + struct.pack("<Q", rest[-1])


def behind(mark, at, numbers, file):
    """A file with other bytes so far behind a mark."""
    place = file.index(mark) + len(mark) + at
    return file[:place] + numbers + file[place + len(numbers) :]


def told(key, number):
    """A file that says another number under a key."""
    return partial(behind, key.encode() + struct.pack("<I", 4), 0, struct.pack("<I", number))


placed = partial(partial, behind, b"blk.0.attn_q.weight")
"""Makes other bytes so far behind the name of a matrix of two dimensions."""
EARLY = WHOLE.format("the place of blk.0.attn_q.weight is before those of all weights")
DEEP, NESTED = WHOLE.format("maximum recursion depth exceeded.*"), struct.pack("<IQ", 9, 1)
BROKEN = {
    "two bytes": (lambda f: b"GG", SHORT),
    "another kind of file": (lambda f: b"PK" * 100, WHOLE.format("GGUF magic invalid")),
    "another version": (lambda f: f[:4] + struct.pack("<I", 9) + f[8:], WHOLE.format(".*9.*")),
    "another order of bytes": (lambda f: f[:4] + f[7:3:-1] + f[8:], SHORT),
    "cut in its header": (lambda f: f[:10], SHORT),
    "cut in its entries": (lambda f: f[:300], SHORT),
    "cut in its weights": (lambda f: f[:-1], SHORT),
    "an array of 2^40 bytes": (lambda f: counts(0, 1) + field(9, 0, 2**40), SHORT),
    "an array of 2^40 words": (lambda f: counts(0, 1) + field(9, 8, 2**40), SHORT),
    "a word of 2^40 bytes": (lambda f: counts(0, 1) + field(8, 2**40), SHORT),
    "2^64 - 1 entries": (lambda f: counts(0, 2**64 - 1), SHORT),
    "2^40 tensors": (lambda f: counts(2**40, 0), SHORT),
    "2^31 dimensions": (placed(0, struct.pack("<I", 2**31)), SHORT),
    "2^40 columns": (placed(4, struct.pack("<Q", 2**40)), SHORT),
    "as many as wrap around": (placed(4, struct.pack("<QQ", 2**32, 2**32)), WHOLE.format(".*")),
    "weights behind the end": (placed(24, struct.pack("<Q", 2**40)), SHORT),
    "weights before the start": (placed(24, struct.pack("<Q", 2**64 - 64)), EARLY),
    "arrays in arrays": (lambda f: counts(0, 1) + field(9, 9, 1) + NESTED * 3000, DEEP),
    "nothing": (lambda f: counts(0, 0), "is a GGUF file without a model"),
    "no heads": (told("llama.attention.head_count", 0), ZERO),
    "no heads of keys": (told("llama.attention.head_count_kv", 0), ZERO),
    "five heads": (told("llama.attention.head_count", 5), r"not a multiple of .* heads \(5\)"),
    "five heads of keys": (told("llama.attention.head_count_kv", 5), "have other shapes than"),
}


FIRST = dict.fromkeys(("weights before the start", "five heads"), "it notices another fault first")


@pytest.mark.parametrize("case", marked(BROKEN, FIRST))
def test_a_broken_file_is_refused_at_once_in_a_sentence(case, folder, tmp_path):
    change, sentence = BROKEN[case]
    (tmp_path / "model.gguf").write_bytes(change((folder / "model.gguf").read_bytes()))
    with pytest.raises(CheckpointError, match=sentence):
        lb.load_checkpoint(tmp_path / "model.gguf")


def test_files_without_a_type(tmp_path):
    save_gguf(tmp_path / "untyped.gguf", file_type=False)
    assert weight_files.check_gguf("untyped", tmp_path / "untyped.gguf").startswith("GGUF Q4_1 (14")


# -- builtin:smollm2 -------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_capture_is_the_models_own_attention():
    checkpoint = lb.load_checkpoint("builtin:smollm2")
    said = describe("smollm2")
    config = checkpoint.model.config
    assert (said.architecture, said.layers, said.heads, said.width) == (
        type(checkpoint.model).__name__,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_size,
    )
    assert checkpoint.quantization == "GGUF Q4_1 (210 tensors Q4_1, 61 F32, 1 Q8_0)"
    words = ["Down", "Ġthe", "ĠRabbit", "-", "H", "ole", ",", "Ġ", "1", "2"]
    assert checkpoint.tokenizer().tokenize("Down the Rabbit-Hole, 12") == words
    batch = lb.prepare(checkpoint, samples=1, max_length=32).batch
    outputs = {}
    for i in (0, 15):
        projection = checkpoint.model.layers[i].self_attn.o_proj
        projection.register_forward_pre_hook(
            lambda module, args, i=i: outputs.update({i: args[0].detach()})
        )
    with torch.no_grad():
        checkpoint.model(**batch)
    own = dict(outputs)
    for layer, i in zip(Capturer(checkpoint.model, [0, 15]).run(batch), (0, 15), strict=True):
        assert layer.error < capture_error(layer.attention)
        heads = layer.attention.out.transpose(1, 2).flatten(2)
        assert float((heads - own[i]).norm() / own[i].norm()) < 1e-5
