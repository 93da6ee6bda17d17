"""Text from wherever it comes: one rule for samples, token numbers, data frames, saved and packed
files, odd tokenizers and rows."""

import gzip
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from support.models import AFFINE, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Whitespace

import lipbound as lb
from lipbound.analysis.length_growth import stream
from lipbound.errors import CaptureError, CheckpointError, InputsError, Notice
from lipbound.models.checkpoint import Inputs
from lipbound.models.inputs import prepare, token_texts
from lipbound.models.loading import Checkpoint, load_checkpoint

LONG = " ".join(f"w{k % 40}" for k in range(25))
SHORT = ["the ferry is in a clock", "keeper", "a lighthouse and the island"]


@pytest.fixture(scope="module")
def checkpoint(bert: Path) -> Checkpoint:
    return load_checkpoint(bert)


def same(one: Inputs, other: Inputs) -> bool:
    return one.batch.keys() == other.batch.keys() and all(
        torch.equal(one.batch[name], other.batch[name]) for name in one.batch
    )


def folder_of(texts: list[str], folder: Path) -> Path:
    folder.mkdir()
    for k, text in enumerate(texts):
        (folder / f"{k}.txt").write_text(text)
    return folder


def everywhere(texts: list[str], folder: Path) -> list[object]:
    """The same texts in a list, a tuple, a table, a data frame, a series, a dataset and
    a folder."""
    frame = pd.DataFrame({"text": texts})
    folder.mkdir()
    frame.to_csv(folder / "t.csv", index=False)
    frame.to_csv(folder / "t.tsv", index=False, sep="\t")
    frame.to_csv(folder / "t.csv.gz", index=False)
    frame.to_json(folder / "t.jsonl", orient="records", lines=True)
    frame.to_json(folder / "t.jsonl.gz", orient="records", lines=True)
    dataset = datasets.Dataset.from_dict({"text": texts})
    dataset.save_to_disk(folder / "saved")
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"text": ["w1"]}), "test": dataset}
    ).save_to_disk(folder / "splits")
    paths = sorted(folder_of(texts, folder / "texts").iterdir())
    return [
        texts,
        tuple(texts),
        np.array(texts),
        np.array(texts, dtype=object),
        frame,
        frame["text"],
        dataset,
        datasets.DatasetDict({"test": dataset}),
        datasets.IterableDatasetDict({"test": dataset.to_iterable_dataset()}),
        dataset.to_iterable_dataset(),
        folder / "texts",
        paths,
        [str(path) for path in paths],
        *(
            folder / name
            for name in ("t.csv", "t.tsv", "t.csv.gz", "t.jsonl", "t.jsonl.gz", "saved", "splits")
        ),
    ]


def test_one_text_is_read_in_windows_wherever_it_is(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(LONG)
    (tmp_path / "long.txt.gz").write_bytes(gzip.compress(LONG.encode()))
    expected = prepare(checkpoint, tmp_path / "long.txt", samples=2, max_length=10)
    assert expected.batch["input_ids"].tolist() == [
        checkpoint.tokenizer()(LONG)["input_ids"][start : start + 10] for start in (0, 10)
    ]
    for data in [LONG, tmp_path / "long.txt.gz", *everywhere([LONG], tmp_path / "all")]:
        assert same(prepare(checkpoint, data, samples=2, max_length=10), expected), data
    assert same(
        prepare(checkpoint, [LONG], samples=1, max_length=10),
        prepare(checkpoint, [LONG, "w1"], samples=1, max_length=10),
    )


def test_of_several_texts_each_is_a_sample_wherever_they_are(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    expected = prepare(checkpoint, SHORT, max_length=20)
    assert expected.batch["attention_mask"].sum(-1).tolist() == [6, 1, 5]
    for data in everywhere(SHORT, tmp_path / "all"):
        found = prepare(checkpoint, data, samples=3, max_length=20)
        assert same(found, expected), data
        assert not found.notes


def test_what_is_cut_off_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = folder_of([LONG, *SHORT], tmp_path / "texts")
    for data in ([LONG, *SHORT], folder):
        with pytest.warns(
            Notice,
            match=r"1 of 4 texts: only the first 10 tokens were taken .max_length. of up to 25",
        ):
            assert prepare(checkpoint, data, samples=4, max_length=10).batch["input_ids"].shape == (
                4,
                10,
            )
    with pytest.warns(
        Notice, match=r"the last 5 tokens of the text do not fill a window of 10 and were left out"
    ):
        assert prepare(checkpoint, LONG, samples="all", max_length=10).samples == 2


def test_shuffled_texts_and_windows(checkpoint: Checkpoint) -> None:
    texts = [f"w{k}" for k in range(20)]
    first = (
        prepare(checkpoint, texts, samples=6, shuffle=1, max_length=4)
        .batch["input_ids"]
        .flatten()
        .tolist()
    )
    assert (
        first
        == prepare(checkpoint, texts, samples="all", shuffle=1, max_length=4)
        .batch["input_ids"]
        .flatten()
        .tolist()[:6]
    )
    assert sorted(first) != first
    assert len(set(first)) == 6
    ids = torch.tensor(prepare(checkpoint, texts, samples=20, max_length=4).batch["input_ids"])
    assert (
        prepare(checkpoint, {"input_ids": ids}, samples=6, shuffle=1)
        .batch["input_ids"]
        .flatten()
        .tolist()
        == first
    )
    windows = prepare(checkpoint, LONG, samples=5, max_length=5).batch["input_ids"]
    drawn = prepare(checkpoint, LONG, samples=3, max_length=5, shuffle=2).batch["input_ids"]
    assert all((windows == row).all(-1).any() for row in drawn)
    with pytest.raises(InputsError, match=r"read as a stream; drop shuffle"):
        prepare(
            checkpoint,
            datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(),
            shuffle=0,
            max_length=4,
        )


@pytest.mark.parametrize("bad", ["some", 0, 1.5, True])
def test_counts_that_are_none(checkpoint: Checkpoint, bad: object) -> None:
    with pytest.raises(
        InputsError, match=r"samples is .*; it must be a whole number, at least 1, or 'all'"
    ):
        prepare(checkpoint, SHORT, samples=bad)


def test_sorted_labels_are_told(checkpoint: Checkpoint) -> None:
    texts = [f"w{k} w{k + 1}" for k in range(12)]
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    table = datasets.Dataset.from_dict(
        {"text": texts, "label": [0] * 6 + [1] * 6}, features=features
    )
    with pytest.warns(
        Notice, match=r"sorted by class, and the first 4 are of 1 of 2 classes \(bad\)"
    ):
        prepare(checkpoint, table, samples=4, max_length=4)
    frame = pd.DataFrame({"text": texts, "label": ["bad"] * 6 + ["good"] * 6})
    with pytest.warns(Notice, match=r"the first 4 are of 1 of 2 classes \(bad\)"):
        prepare(checkpoint, frame, samples=4, max_length=4)
    mixed = datasets.Dataset.from_dict(
        {"text": texts, "label": [0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1]}, features=features
    )
    assert not prepare(checkpoint, mixed, samples=4, max_length=4).notes
    assert not prepare(checkpoint, table, samples=4, shuffle=0, max_length=4).notes


ROWS = [[4, 7, 12], [5, 9], [3]]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        [torch.tensor(row) for row in ROWS],
        [np.array(row) for row in ROWS],
        datasets.Dataset.from_dict({"input_ids": ROWS, "text": ["w1", "w2", "w3"]}),
        datasets.Dataset.from_dict({"input_ids": ROWS}).with_format("torch"),
        datasets.Dataset.from_dict(
            {
                "input_ids": [[4, 7, 12], [0, 5, 9], [3, 0, 0]],
                "attention_mask": [[1, 1, 1], [0, 1, 1], [1, 0, 0]],
                "labels": [0, 1, 0],
            }
        ),
        pd.DataFrame({"input_ids": ROWS}),
        pd.Series(ROWS),
    ],
    ids=[
        "lists",
        "tensors",
        "arrays",
        "dataset",
        "torch dataset",
        "padded dataset",
        "frame",
        "series",
    ],
)
def test_token_numbers(checkpoint: Checkpoint, data: object) -> None:
    inputs = prepare(checkpoint, data, max_length=20)
    assert inputs.batch["input_ids"].tolist() == [[4, 7, 12], [5, 9, 0], [3, 0, 0]]
    assert inputs.batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert not inputs.notes
    with pytest.warns(Notice, match=r"1 of 3 texts: only the first 2 tokens were taken"):
        assert prepare(checkpoint, data, max_length=2).batch["input_ids"].shape == (3, 2)


@pytest.mark.parametrize(
    "data",
    [
        [4, 7, 12],
        (4, 7, 12),
        torch.tensor([4, 7, 12]),
        np.array([4, 7, 12], dtype=np.int32),
        torch.tensor([[4, 7, 12]]),
    ],
)
def test_the_token_numbers_of_one_text(checkpoint: Checkpoint, data: object) -> None:
    assert prepare(checkpoint, data).batch["input_ids"].tolist() == [[4, 7, 12]]


def test_token_numbers_need_no_tokenizer_and_must_be_known() -> None:
    bare = load_checkpoint(build(AFFINE["bert"]))
    assert prepare(bare, ROWS).samples == 3
    for data in ([[4, 60]], [[4, -1]], torch.tensor([[4, 99]])):
        with pytest.raises(InputsError, match=r"input_ids has the number .* knows tokens 0 to 59"):
            prepare(bare, data)
    with pytest.raises(
        CheckpointError, match=r"token numbers, or name another tokenizer with tokenizer="
    ):
        prepare(bare, SHORT, max_length=20)


def tokens_only(**special: str) -> tf.PreTrainedTokenizerFast:
    core = Tokenizer(
        WordLevel(
            {w: k for k, w in enumerate(["the", "ferry", "is", "late", "?"])},
            **({"unk_token": "?"} if special else {}),
        )
    )
    core.pre_tokenizer = Whitespace()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=["input_ids"], **special
    )


def with_tokenizer(model: Path, folder: Path, tokenizer: tf.PreTrainedTokenizerFast) -> Checkpoint:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("token*", "special*"))
    tokenizer.save_pretrained(folder)
    return load_checkpoint(folder)


def test_a_tokenizer_without_special_tokens_and_mask(bert: Path, tmp_path: Path) -> None:
    bare = with_tokenizer(bert, tmp_path / "bare", tokens_only())
    inputs = prepare(bare, ["the ferry is late", "ferry late"], max_length=20)
    assert inputs.batch["input_ids"][0].tolist() == [0, 1, 2, 3]
    assert inputs.batch["input_ids"][1, :2].tolist() == [1, 3]
    assert inputs.batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    with pytest.raises(InputsError, match=r"the tokenizer of .* does not take the text: .*UNK"):
        prepare(bare, ["the gull"], max_length=20)


def test_texts_without_tokens(bert: Path, tmp_path: Path) -> None:
    bare = with_tokenizer(bert, tmp_path / "bare", tokens_only(unk_token="?"))
    for broken in ("\ud800 the", ["the", "\ud800"]):
        with pytest.raises(InputsError, match=r"the tokenizer of .* does not take the text"):
            prepare(bare, broken, max_length=20)
    deaf = tokens_only(unk_token="?")
    deaf.backend_tokenizer.normalizer = Replace("gull", "")
    deaf = with_tokenizer(bert, tmp_path / "deaf", deaf)
    with pytest.warns(Notice, match="1 of 3 texts have no token and were passed over"):
        assert prepare(deaf, ["the", "gull", "ferry"], max_length=20).samples == 2
    for nothing in ("gull gull", ["gull", "gull gull"]):
        with pytest.raises(InputsError, match="no token for the tokenizer of"):
            prepare(deaf, nothing, max_length=20)


def test_windows_of_a_tokenizer_in_python(tmp_path: Path) -> None:
    words = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWC", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tf.EsmTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = tf.EsmConfig(
        vocab_size=len(words),
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=60,
        pad_token_id=1,
        mask_token_id=24,
    )
    tf.EsmModel(config).save_pretrained(tmp_path)
    protein = load_checkpoint(tmp_path)
    inputs = prepare(protein, "MKT LLA GGS", samples=2, max_length=6)
    letters = [words.index(c) for c in "MKTLLAGGS"]
    assert inputs.batch["input_ids"].tolist() == [[0, *letters[:4], 2], [0, *letters[4:8], 2]]
    assert not inputs.notes
    with pytest.warns(
        Notice,
        match=r"most tokens of 2 of 2 samples are <unk>, which stands for what",
    ):
        inputs = prepare(protein, samples=2, max_length=30)
    assert inputs.description == "the story of a lighthouse clock that comes with lipbound"


def test_repeated_samples_are_told(checkpoint: Checkpoint) -> None:
    with pytest.warns(
        Notice,
        match=r"only 2 of 4 samples are different: samples 1, 3 repeat earlier ones, and means "
        r"count them again",
    ):
        prepare(checkpoint, ["w1", "w1", "w2", "w2"], max_length=4)
    with pytest.warns(Notice, match="sample 2 repeats one, and means count it again"):
        prepare(checkpoint, ["w1", "w2", "w1"], max_length=4)


@pytest.mark.parametrize(
    ("ids", "mask", "told"),
    [
        ([5, 6, 0], None, True),
        ([0, 0, 5], None, True),
        ([0, 5, 6], None, False),
        ([5, 6, 0], [1, 1, 0], False),
    ],
)
def test_padding_without_a_mask_is_told(
    checkpoint: Checkpoint, ids: list[int], mask: list[int] | None, told: bool
) -> None:
    batch = {"input_ids": torch.tensor([[7, 8, 9], ids])} | (
        {} if mask is None else {"attention_mask": torch.tensor([[1, 1, 1], mask])}
    )
    notes = prepare(checkpoint, batch).notes
    assert [
        note.startswith("1 of 2 samples end or begin with the model's padding token (0)")
        for note in notes
    ] == [True] * told


def test_float_masks_of_0_and_1_are_told(checkpoint: Checkpoint) -> None:
    ids, ones = torch.tensor([[7, 8, 9]]), torch.ones(1, 1, 3, 3)
    assert any(
        "are added to the scores and mask nothing" in note
        for note in prepare(checkpoint, {"input_ids": ids, "attention_mask": ones.tril()}).notes
    )
    for mask in (
        ones.tril().bool(),
        torch.zeros(1, 1, 3, 3).masked_fill(ones.triu(1).bool(), -torch.inf),
    ):
        assert not prepare(checkpoint, {"input_ids": ids, "attention_mask": mask}).notes


def test_a_layer_of_ones_own_and_captures_are_told_of_such_masks(checkpoint: Checkpoint) -> None:
    x, w = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2, 8, 4)
    with pytest.warns(
        Notice, match="mask holds 0 and 1, which are added to the scores and forbid nothing"
    ):
        lb.Attention(x, w, w, w, mask=torch.ones(3, 3).tril())
    ids = torch.tensor([[7, 8, 9]])
    with (
        pytest.warns(Notice, match="attention_mask has 4 axes and holds the numbers 0 and 1"),
        suppress(CaptureError),
    ):
        lb.capture(
            checkpoint.model, {"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 3).tril()}
        )
    with pytest.warns(Notice, match="1 of 1 samples end or begin with the model's padding token"):
        lb.capture(checkpoint.model, {"input_ids": torch.tensor([[7, 8, 0]])})


def test_embeddings_that_are_no_numbers(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        InputsError, match=r"inputs_embeds \(torch\.float32\) must be floating-point and finite"
    ):
        prepare(checkpoint, {"inputs_embeds": torch.full((1, 3, 24), torch.nan)})


def test_hidden_files_are_no_texts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = folder_of(SHORT, tmp_path / "texts")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "0-checkpoint.txt").write_text("w1")
    (folder / "README.md").write_text("w2")
    assert prepare(checkpoint, folder, samples="all", max_length=20).samples == 3


def rows_that_end_early() -> Iterator[dict[str, object]]:
    yield {"text": "the ferry"}
    yield {"text": "the clock"}
    raise ConnectionError("the line went dead")


def test_streams_that_break_off(checkpoint: Checkpoint) -> None:
    stream_of = datasets.IterableDataset.from_generator(
        rows_that_end_early, features=datasets.Features({"text": datasets.Value("string")})
    )
    assert prepare(checkpoint, stream_of, samples=2, max_length=8).samples == 2
    with pytest.raises(InputsError, match=r"breaks off after 2 rows: the line went dead"):
        prepare(checkpoint, stream_of, samples=3, max_length=8)


@pytest.mark.parametrize("row", [3, 2.5, {"a": "b"}, ["w1", "w2"], b"w1"])
def test_rows_of_another_kind(checkpoint: Checkpoint, row: object) -> None:
    with pytest.raises(
        InputsError,
        match=r"column 'text' of a data frame holds .*, but .* takes text; name another with "
        r"column=",
    ):
        prepare(checkpoint, pd.DataFrame({"text": ["w1", row, "w3"]}, dtype=object), max_length=8)


def test_folders_of_tables_are_named_without_their_path(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    pd.DataFrame({"text": ["w1", "w2"]}).to_parquet(tmp_path / "test.parquet")
    assert (
        prepare(checkpoint, tmp_path, samples="all", max_length=8).description
        == f"{tmp_path.name}, test split"
    )


def test_texts_and_tokens_do_not_mix(checkpoint: Checkpoint) -> None:
    with pytest.raises(InputsError, match="holds texts and token numbers; give one kind"):
        prepare(checkpoint, ["w1", [4, 5]], max_length=8)


def test_missing_rows_are_told(checkpoint: Checkpoint) -> None:
    for data in (
        pd.DataFrame({"text": ["w1", None, float("nan"), " ", "w3"]}),
        datasets.Dataset.from_dict({"text": ["w1", None, None, "", "w3"]}),
    ):
        with pytest.warns(Notice, match=r"were passed over: 3"):
            assert prepare(checkpoint, data, max_length=8).batch["input_ids"].shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt.gz", b"plain"),
        ("a.csv.gz", b"plain"),
        ("a.jsonl", b'{"text": "w1"}\n{"text": '),
        ("a.parquet", b"PAR1"),
    ],
)
def test_broken_files(checkpoint: Checkpoint, name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputsError, match=rf"{name}.*(cannot|could not) be read"):
        prepare(checkpoint, tmp_path / name, max_length=8)


def test_another_tokenizer(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder, ignore=shutil.ignore_patterns("token*", "special*"))
    expected = prepare(load_checkpoint(bert), SHORT, max_length=20)
    assert same(prepare(load_checkpoint(folder, tokenizer=bert), SHORT, max_length=20), expected)
    assert same(
        prepare(load_checkpoint(build(AFFINE["bert"]), tokenizer=str(bert)), SHORT, max_length=20),
        expected,
    )
    with pytest.raises(CheckpointError, match=r"has no files of its tokenizer"):
        prepare(load_checkpoint(bert, tokenizer=tmp_path), SHORT, max_length=20)
    with pytest.raises(
        CheckpointError, match=r"tokenizer is of type .*; give a directory .*or a hub id"
    ):
        load_checkpoint(bert, tokenizer=load_checkpoint(bert).tokenizer())
    named = load_checkpoint(build(AFFINE["bert"]), tokenizer=bert)
    assert token_texts(named, expected) == SHORT[0].split()
    tokens, _ = stream(load_checkpoint(folder, tokenizer=bert), SHORT, 7)
    assert tokens.tolist() == [*expected.batch["input_ids"][0].tolist(), 14]


def test_files_that_are_not_there_are_not_sought_on_the_hub(checkpoint: Checkpoint) -> None:
    for name in ("letters.txt", "letters.txt.gz", "face.png"):
        with pytest.raises(InputsError, match=f"there is no file or folder {name}"):
            prepare(checkpoint, name, max_length=16)


def test_a_processor_of_images_is_not_looked_at_for_text() -> None:
    with pytest.warns(
        Notice, match="processor elsewhere is not looked at: builtin:gpt2 reads text"
    ):
        assert load_checkpoint("builtin:gpt2", processor="elsewhere").notes
    with pytest.warns(
        Notice, match="tokenizer elsewhere is not looked at: builtin:vit reads images"
    ):
        assert load_checkpoint("builtin:vit", tokenizer="elsewhere").notes


def test_special_tokens_leave_room(tmp_path: Path) -> None:
    """However many texts there are: a tokenizer cuts nothing where only they would be left."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "w"]))
    tf.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(build(AFFINE["bert"]), tokenizer=tmp_path)
    for length in (1, 2):
        for data in ("w w w w", ["w w w", "w"]):
            with pytest.raises(InputsError, match=r"leaves no room beside 2 special"):
                prepare(checkpoint, data, max_length=length)
    inputs = prepare(checkpoint, ["w w w", "w"], max_length=3)
    assert inputs.batch["input_ids"].tolist() == [[2, 4, 3], [2, 4, 3]]
    assert inputs.preprocessing == "BertTokenizer, each text cut at 3 tokens"


def test_a_tokenizer_of_no_class_of_its_own_is_called_by_whose_it_is(
    bert: Path, tmp_path: Path
) -> None:
    plain = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tf.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "words")
    model = build(AFFINE["bert"])
    model.save_pretrained(tmp_path / "words")
    own = prepare(load_checkpoint(tmp_path / "words"), ["a b"], max_length=4)
    other = prepare(load_checkpoint(model, tokenizer=tmp_path / "words"), ["a b"], max_length=4)
    assert own.preprocessing.startswith("the model's tokenizer, ")
    assert other.preprocessing.startswith("the tokenizer of words, ")


def test_a_pointer_for_a_tokenizer_is_named(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model" / "tokenizer.json").write_text(pointer)
    for checkpoint in (
        load_checkpoint(tmp_path / "model"),
        load_checkpoint(bert, tokenizer=tmp_path / "model"),
    ):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is a pointer of Git LFS"):
            prepare(checkpoint, ["the ferry"], max_length=4)


def test_lists_of_files_of_which_some_are_missing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("the ferry")
    for names in (["here.txt", "gone.txt"], ["gone.txt", "lost.txt"]):
        with pytest.raises(
            InputsError, match=r"there is no file .*gone\.txt|gone\.txt, which is no such file"
        ):
            prepare(checkpoint, [str(tmp_path / name) for name in names], max_length=4)
    texts = ["the clock of a.txt", "keeper of b.txt"]
    assert prepare(checkpoint, texts, max_length=4).samples == 2


def test_rows_without_token_numbers_are_blank(checkpoint: Checkpoint) -> None:
    with pytest.warns(Notice, match="blank texts of 2 given texts of token numbers"):
        assert prepare(checkpoint, [[], [5, 6, 7]], max_length=4).samples == 1


def test_lines_of_json_by_their_other_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name in ("t.jsonl", "t.ndjson"):
        (tmp_path / name).write_text('{"text": "the ferry"}\n{"text": "a clock"}\n')
    one, other = (
        prepare(checkpoint, tmp_path / f"t.{e}", max_length=4) for e in ("jsonl", "ndjson")
    )
    assert same(one, other)
