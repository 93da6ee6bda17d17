"""Text from wherever it comes: one rule for samples, data frames, saved and packed files, odd
tokenizers and rows."""

import gzip
import itertools
import shutil

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from support.checks import close, refused
from support.models import AFFINE, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Whitespace

import lipbound as lb
from lipbound.errors import CheckpointError, InputsError, Notice
from lipbound.models.inputs import prepare, token_texts
from lipbound.models.loading import load_checkpoint
from lipbound.models.readers import stream

LONG = " ".join(f"w{k % 40}" for k in range(25))
SHORT = ["the ferry is in a clock", "keeper", "a lighthouse and the island"]


@pytest.fixture(scope="module")
def checkpoint(bert):
    return load_checkpoint(bert)


def ids(checkpoint, data, **options):
    return prepare(checkpoint, data, **options).batch["input_ids"].tolist()


def folder_of(texts, folder):
    folder.mkdir()
    for k, text in enumerate(texts):
        (folder / f"{k}.txt").write_text(text)
    return folder


def everywhere(texts, folder):
    """The same texts in a list, a tuple, a table, a data frame, a series, a dataset and
    a folder."""
    frame = pd.DataFrame({"text": texts})
    folder.mkdir()
    for name in ("t.csv", "t.csv.gz"):
        frame.to_csv(folder / name, index=False)
    frame.to_csv(folder / "t.tsv", index=False, sep="\t")
    frame.to_parquet(folder / "t.parquet")
    for name in ("t.jsonl", "t.jsonl.gz", "t.ndjson"):
        frame.to_json(folder / name, orient="records", lines=True)
    files = sorted(folder.iterdir())
    dataset = datasets.Dataset.from_dict({"text": texts})
    dataset.save_to_disk(folder / "saved")
    splits = {"train": datasets.Dataset.from_dict({"text": ["w1"]}), "test": dataset}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits")
    paths = sorted(folder_of(texts, folder / "texts").iterdir())
    return [
        *(texts, tuple(texts), np.array(texts), np.array(texts, dtype=object)),
        *(frame, frame["text"], dataset, dataset.to_iterable_dataset()),
        datasets.DatasetDict({"test": dataset}),
        datasets.IterableDatasetDict({"test": dataset.to_iterable_dataset()}),
        *(folder / "texts", paths, [str(path) for path in paths]),
        *(*files, folder / "saved", folder / "splits"),
    ]


def test_one_text_is_read_in_windows_wherever_it_is(checkpoint, tmp_path):
    (tmp_path / "long.txt").write_text(LONG)
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    expected = prepare(checkpoint, tmp_path / "long.txt", samples=2, max_length=10)
    whole = checkpoint.tokenizer()(LONG)["input_ids"]
    assert expected.batch["input_ids"].tolist() == [whole[:10], whole[10:20]]
    for data in [LONG, tmp_path / "long.txt.gz", *everywhere([LONG], tmp_path / "all")]:
        close(prepare(checkpoint, data, samples=2, max_length=10).batch, expected.batch, 0)
    one, first = (ids(checkpoint, t, samples=1, max_length=10) for t in ([LONG], [LONG, "w1"]))
    assert one == first


def test_line_ends_of_other_systems_are_line_ends(tmp_path):
    """A tokenizer of bytes would take a carriage return for a character of the text."""
    checkpoint, text = load_checkpoint("builtin:gpt2"), b"the queen\nof hearts\n"
    for end in (b"\r\n", b"\r"):
        (tmp_path / "text.txt").write_bytes(text.replace(b"\n", end))
        (tmp_path / "text.txt.gz").write_bytes(gzip.compress(text.replace(b"\n", end)))
        for name in ("text.txt", "text.txt.gz"):
            assert ids(checkpoint, tmp_path / name) == ids(checkpoint, [text.decode()])


def test_of_several_texts_each_is_a_sample_wherever_they_are(checkpoint, tmp_path):
    expected = prepare(checkpoint, SHORT, max_length=20)
    assert expected.batch["attention_mask"].sum(-1).tolist() == [6, 1, 5]
    for data in everywhere(SHORT, tmp_path / "all"):
        found = prepare(checkpoint, data, samples=3, max_length=20)
        close(found.batch, expected.batch, 0)
        assert found.fingerprint == expected.fingerprint
        assert not found.notes


def test_shuffled_texts_and_windows(checkpoint):
    texts, options = [f"w{k}" for k in range(20)], {"samples": 6, "shuffle": 1, "max_length": 4}
    first = ids(checkpoint, texts, **options)
    assert first == ids(checkpoint, texts, **options | {"samples": "all"})[:6]
    assert sorted(first) != first
    assert len({row[0] for row in first}) == 6
    every = torch.tensor(ids(checkpoint, texts, samples=20, max_length=4))
    assert ids(checkpoint, {"input_ids": every}, samples=6, shuffle=1) == first
    windows = ids(checkpoint, LONG, samples=5, max_length=5)
    assert all(row in windows for row in ids(checkpoint, LONG, samples=3, max_length=5, shuffle=2))
    table = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
    with pytest.raises(InputsError, match=r"read as a stream; drop shuffle"):
        prepare(checkpoint, table, shuffle=0, max_length=4)


def test_token_numbers_are_ready_inputs_that_need_no_tokenizer(checkpoint):
    bare = load_checkpoint(build(AFFINE["bert"]))
    rows = [[4, 7], [5, 9], [3, 4]]
    pair = (prepare(bare, data).batch for data in ({"input_ids": rows}, torch.tensor(rows)))
    close(*pair, 0)
    for row in ([4, 60], [4, -1]):
        words = "input_ids has the number ", " knows tokens 0 to 59"
        refused(lambda r=row: prepare(bare, {"input_ids": [r]}), *words, error=InputsError)
    words = "token numbers, or name another tokenizer with"
    refused(lambda: prepare(bare, SHORT, max_length=20), words, error=CheckpointError)
    for data, said in (
        ([[4, 7], [5]], "takes text; token numbers are ready inputs, "),
        (torch.tensor([4, 7]), "ready inputs must be named tensors of "),
        (datasets.Dataset.from_dict({"input_ids": [[4]]}), "has no column of a usual name"),
    ):
        refused(lambda d=data: prepare(checkpoint, d), said, error=InputsError)


def tokens_only(**special):
    words = {word: k for k, word in enumerate(["the", "ferry", "is", "late", "?"])}
    core = Tokenizer(WordLevel(words, **({"unk_token": "?"} if special else {})))
    core.pre_tokenizer = Whitespace()
    options = {"model_input_names": ["input_ids"], **special}
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, **options)


def with_tokenizer(model, folder, tokenizer):
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("token*", "special*"))
    tokenizer.save_pretrained(folder)
    return load_checkpoint(folder)


def test_tokenizers_without_special_tokens_and_texts_without_tokens(bert, tmp_path):
    bare = with_tokenizer(bert, tmp_path / "bare", tokens_only())
    inputs = prepare(bare, ["the ferry is late", "ferry late"], max_length=20)
    assert inputs.batch["input_ids"][0].tolist() == [0, 1, 2, 3]
    assert inputs.batch["input_ids"][1, :2].tolist() == [1, 3]
    assert inputs.batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    for broken in (["the gull"], "\ud800 the", ["the", "\ud800"]):
        words = "the tokenizer of ", " does not take the text: "
        refused(lambda b=broken: prepare(bare, b, max_length=20), *words, error=InputsError)
    deaf = tokens_only(unk_token="?")
    deaf.backend_tokenizer.normalizer = Replace("gull", "")
    deaf = with_tokenizer(bert, tmp_path / "deaf", deaf)
    with pytest.warns(Notice, match="1 of 3 texts have no token and were passed over"):
        assert prepare(deaf, ["the", "gull", "ferry"], max_length=20).samples == 2
    for nothing in ("gull gull", ["gull", "gull gull"]):
        words = "has no token for the tokenizer of"
        refused(lambda n=nothing: prepare(deaf, n, max_length=20), words, error=InputsError)


def test_windows_of_a_tokenizer_in_python(tmp_path):
    words = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWC", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tf.EsmTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32}
    sizes |= {"vocab_size": len(words), "num_hidden_layers": 1, "max_position_embeddings": 60}
    config = tf.EsmConfig(**sizes, pad_token_id=1, mask_token_id=24)
    build(lambda: tf.EsmModel(config)).save_pretrained(tmp_path)
    protein = load_checkpoint(tmp_path)
    inputs = prepare(protein, "MKT LLA GGS", samples=2, max_length=6)
    letters = [words.index(c) for c in "MKTLLAGGS"]
    assert inputs.batch["input_ids"].tolist() == [[0, *letters[:4], 2], [0, *letters[4:8], 2]]
    assert not inputs.notes
    with pytest.warns(Notice, match="most tokens of 2 of 2 samples are <unk>, unknown to the"):
        inputs = prepare(protein, samples=2, max_length=30)
    assert inputs.description == "the story of a lighthouse clock that comes with lipbound"


ENDS = {"input_ids": torch.tensor([[7, 8, 9], [5, 6, 0]])}
BEGINS = {"input_ids": torch.tensor([[7, 8, 9], [0, 0, 5]])}
PADDING = "1 of 2 samples end or begin with the model's padding token"
ONES = torch.ones(1, 1, 3, 3)
IDS = {"input_ids": torch.tensor([[7, 8, 9]])}
MISSING = {"text": ["w1", None, None, " ", "w3"]}
TOLD = {
    # data, options, and what is told, or "" for nothing
    "cut": ([LONG, *SHORT], {"max_length": 10}, "1 of 4 texts: only the first 10 tokens .* to 25"),
    "left": (LONG, {"samples": "all", "max_length": 10}, "the last 5 tokens .* window of 10 and"),
    "repeated": (["w1", "w1", "w2", "w2"], {}, "only 2 of 4 samples are different"),
    "repeated once": (["w1", "w2", "w1"], {}, "only 2 of 3 samples are different"),
    "padding after": (ENDS, {}, PADDING),
    "padding before": (BEGINS, {}, PADDING),
    "one zero before": ({"input_ids": torch.tensor([[7, 8, 9], [0, 5, 6]])}, {}, ""),
    "masked": (ENDS | {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, {}, ""),
    "missing": (datasets.Dataset.from_dict(MISSING), {}, "were passed over: 3"),
    "missing in a frame": (pd.DataFrame(MISSING), {}, "were passed over: 3"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told(case, checkpoint, recwarn):
    data, options, words = TOLD[case]
    notes = prepare(checkpoint, data, **{"max_length": 4} | options).notes
    assert [str(one.message) for one in recwarn if one.category is Notice] == notes
    assert len(notes) == bool(words)
    if words:
        with pytest.warns(Notice, match=words):
            lb.errors.tell(*notes)


def test_a_layer_of_ones_own_and_captures_are_told_of_such_masks(checkpoint):
    x, w = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2, 8, 4)
    words = "mask holds 0 and 1, which are added to the scores and forbid"
    with pytest.warns(Notice, match=words):
        lb.Attention(x, w, w, w, mask=torch.ones(3, 3).tril())
    with pytest.warns(Notice, match=words):
        lb.capture(checkpoint.model, IDS | {"attention_mask": ONES.tril()})
    with pytest.warns(Notice, match=PADDING):
        lb.capture(checkpoint.model, ENDS)


def test_hidden_files_are_no_texts(checkpoint, tmp_path):
    folder = folder_of(SHORT, tmp_path / "texts")
    folder_of(["w1"], folder / ".ipynb_checkpoints")
    (folder / "README.md").write_text("w2")
    assert prepare(checkpoint, folder, samples="all", max_length=20).samples == 3


@pytest.mark.parametrize("row", [3, 2.5, {"a": "b"}, ["w1", "w2"], b"w1"])
def test_rows_of_another_kind(checkpoint, row):
    table = datasets.Dataset.from_dict({"text": [row, row]})
    words = "column 'text' of a dataset holds ", " takes text; name another"
    refused(lambda: prepare(checkpoint, table, max_length=8), *words, error=InputsError)
    frame = pd.DataFrame({"text": ["w1", row, "w3"]}, dtype=object)
    with pytest.raises(InputsError, match=r"data of type DataFrame could not be read|holds bytes"):
        prepare(checkpoint, frame, max_length=8)


def test_files_that_are_broken_or_not_there(checkpoint, tmp_path):
    """They are not sought on the hub."""
    (tmp_path / "here.txt").write_text("the ferry")
    broken = {"a.txt.gz": b"w1", "a.csv.gz": b"w1", "a.jsonl": b'{"text": ', "a.parquet": b"PAR1"}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    gone = [str(tmp_path / name) for name in ("gone.txt", "here.txt", "lost.txt")]
    for data, words in (
        *((tmp_path / name, " be read") for name in broken),
        *((n, f"there is no file or folder {n}") for n in ("letters.txt", "l.txt.gz", "face.png")),
        *((some, "gone.txt, which is no such file") for some in (gone[:2], gone[::2])),
        *((kind, f"'{kind}', the name of a kind of files") for kind in ("text", "imagefolder")),
    ):
        refused(lambda d=data: prepare(checkpoint, d, max_length=4), words, error=InputsError)
    texts = ["the clock of a.txt", "keeper of b.txt"]
    assert prepare(checkpoint, texts, max_length=4).samples == 2


def test_another_tokenizer(bert, tmp_path):
    folder, model = tmp_path / "model", build(AFFINE["bert"])
    shutil.copytree(bert, folder, ignore=shutil.ignore_patterns("token*", "special*"))
    expected = prepare(load_checkpoint(bert), SHORT, max_length=20)
    lent = load_checkpoint(folder, tokenizer=bert)
    for mine in (lent, load_checkpoint(model, tokenizer=str(bert))):
        close(prepare(mine, SHORT, max_length=20).batch, expected.batch, 0)
        assert token_texts(mine, expected) == SHORT[0].split()
    tokens, _ = stream(lent, SHORT, 7)
    assert tokens.tolist() == [*expected.batch["input_ids"][0].tolist(), 14]
    without, loaded = load_checkpoint(bert, tokenizer=tmp_path), load_checkpoint(bert).tokenizer()
    refused(lambda: prepare(without, SHORT, max_length=20), "has no files of its tokenizer")
    words = "tokenizer is of type ", "; give its directory or hub id"
    refused(lambda: load_checkpoint(bert, tokenizer=loaded), *words, error=CheckpointError)


@pytest.mark.parametrize(("mine", "other"), [("gpt2", "processor"), ("vit", "tokenizer")])
def test_what_the_modality_has_no_use_for_is_told(mine, other):
    with pytest.warns(Notice, match=f"{other} elsewhere is not looked at: builtin:{mine} reads"):
        assert load_checkpoint(f"builtin:{mine}", **{other: "elsewhere"}).notes


def test_special_tokens_leave_room(tmp_path):
    """However many texts there are: a tokenizer cuts nothing where only they would be left."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "w"]))
    tf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(build(AFFINE["bert"]), tokenizer=tmp_path)
    for length, data in itertools.product((1, 2), ("w w w w", ["w w w", "w"])):
        words = "leaves no room beside 2 special"
        refused(lambda d=data, n=length: prepare(checkpoint, d, max_length=n), words)
    inputs = prepare(checkpoint, ["w w w", "w"], max_length=3)
    assert inputs.batch["input_ids"].tolist() == [[2, 4, 3], [2, 4, 3]]
    assert inputs.preprocessing == "BertTokenizer, each text cut at 3 tokens"
