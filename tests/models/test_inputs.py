from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
import skimage
import torch
import transformers as tf
from huggingface_hub.errors import HFValidationError
from PIL import Image
from safetensors.torch import save_file
from support.models import AFFINE, LLAMA, MODERN, build, save_bert

import lipbound as lb
from lipbound.errors import CheckpointError, InputsError, Notice
from lipbound.models.checkpoint import Inputs
from lipbound.models.inputs import READERS, prepare
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.models.readers.reader import Reader, Selection
from lipbound.models.readers.text import DEFAULT_TEXT


@pytest.fixture(scope="module")
def bert(bert: Path) -> Checkpoint:
    return load_checkpoint(bert)


@pytest.fixture(scope="module")
def vit(vit: Path) -> Checkpoint:
    return load_checkpoint(vit)


def picture(seed: int = 0, size: int = 20) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    )


TEXTS = ["the ferry is in a clock", "keeper", "   ", "a lighthouse and the island"]


def test_minilm_windows_begin_like_plain_truncation() -> None:
    checkpoint = load_checkpoint("builtin:minilm")
    batch = prepare(checkpoint, None, samples=3, max_length=32).batch
    text = DEFAULT_TEXT.read_text()
    plain = checkpoint.tokenizer()(text, truncation=True, max_length=32, return_tensors="pt")
    assert batch["input_ids"].shape == (3, 32)
    assert torch.equal(batch["input_ids"][:1], plain["input_ids"])
    assert len({tuple(row.tolist()) for row in batch["input_ids"]}) == 3
    assert bool((batch["attention_mask"] == 1).all())


def test_text_sources_agree(bert: Checkpoint, tmp_path: Path) -> None:
    frame = pd.DataFrame({"label": [0, 1, 0, 1], "text": TEXTS})
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv", index=False)
    expected = prepare(bert, TEXTS, samples=3, max_length=40).batch
    assert expected["input_ids"].shape[0] == 3  # the blank row is passed over
    assert expected["attention_mask"].sum(-1).tolist() == [6, 1, 5]
    for data in (
        datasets.Dataset.from_pandas(frame),
        tmp_path / "t.parquet",
        str(tmp_path / "t.csv"),
        tuple(TEXTS),
    ):
        batch = prepare(bert, data, samples=3, max_length=40).batch
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert (
        prepare(bert, tmp_path / "t.parquet", samples=3, column="text", max_length=40).fingerprint
        == prepare(bert, TEXTS, samples=3, max_length=40).fingerprint
    )
    assert (
        prepare(bert, TEXTS, samples=2, max_length=40).fingerprint
        != prepare(bert, TEXTS, samples=3, max_length=40).fingerprint
    )


def test_text_file_windows(bert: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"w{k % 30}" for k in range(25)))
    assert prepare(bert, file, samples=8, max_length=10).batch["input_ids"].shape == (2, 10)
    assert prepare(bert, file, samples=8, max_length=40).batch["input_ids"].shape == (1, 25)


def test_image_sources_agree(vit: Checkpoint, tmp_path: Path) -> None:
    pictures = [picture(k) for k in range(3)]
    for k, image in enumerate(pictures):
        image.save(tmp_path / f"{k}.png")
    expected = prepare(vit, pictures).batch["pixel_values"]
    assert expected.shape == (3, 3, 16, 16)
    assert torch.equal(prepare(vit, tmp_path).batch["pixel_values"], expected)
    assert torch.equal(prepare(vit, tmp_path / "0.png").batch["pixel_values"], expected[:1])
    assert torch.equal(prepare(vit, pictures[0]).batch["pixel_values"], expected[:1])
    table = datasets.Dataset.from_dict({"img": pictures, "label": [0, 1, 2]}).cast_column(
        "img", datasets.Image()
    )
    assert torch.equal(prepare(vit, table).batch["pixel_values"], expected)
    table.to_parquet(tmp_path / "t.parquet")
    assert torch.equal(
        prepare(vit, tmp_path / "t.parquet", samples=2).batch["pixel_values"], expected[:2]
    )


def test_default_photographs_are_those_of_scikit_image_as_builtin_models_see_them() -> None:
    """Numbers that were published on the large ones are those on the small ones."""
    checkpoint = load_checkpoint("builtin:vit")
    images, described = READERS["image"].default()
    assert described == "photographs from scikit-image"
    assert sum(image.stat().st_size for image in images) < 5e5
    folder = Path(skimage.__file__).parent / "data"
    large = [next(folder.glob(f"{image.stem[2:]}*.*g")) for image in images]
    found, expected = prepare(checkpoint), prepare(checkpoint, large)
    assert found.samples == 8
    assert torch.equal(found.batch["pixel_values"], expected.batch["pixel_values"])


def test_ready_inputs(bert: Checkpoint, tmp_path: Path) -> None:
    ids = {"input_ids": torch.arange(12).view(3, 4)}
    save_file(ids, tmp_path / "ready.safetensors")
    assert torch.equal(
        prepare(bert, tmp_path / "ready.safetensors", samples=2).batch["input_ids"],
        ids["input_ids"][:2],
    )
    assert prepare(bert, ids).samples == 3


def test_hub_datasets_are_named_with_split_and_config(
    bert: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(repo: str, config: str | None = None, split: str | None = None) -> datasets.Dataset:
        asked.append((repo, config, split))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", fake)
    monkeypatch.setattr("lipbound.models.readers.reader.HfApi", Mock())
    monkeypatch.setattr(
        datasets, "get_dataset_split_names", lambda repo, config: ["train", "validation"]
    )
    assert (
        prepare(bert, "owner/news:small", max_length=40).description
        == "owner/news:small, validation split"
    )
    prepare(bert, "news", split="extra", max_length=40)
    assert asked == [("owner/news", "small", "validation"), ("news", None, "extra")]


def test_positions_count_robertas_offset() -> None:
    def of(family: str) -> int | None:
        model = build(AFFINE[family])
        return Checkpoint(model, family, "", None).positions

    assert (of("bert"), of("roberta"), of("gpt2")) == (40, 38, 40)


def test_positions_without_a_limit() -> None:
    """XLNet declares -1 of them."""
    config = tf.XLNetConfig(vocab_size=60, d_model=24, n_layer=1, n_head=4, d_inner=32)
    checkpoint = Checkpoint(build(lambda: tf.XLNetModel(config)), "xlnet", "", None)
    assert checkpoint.positions is None
    assert prepare(checkpoint, {"input_ids": torch.ones(1, 200, dtype=torch.long)}).samples == 1


def test_lengths_are_refused(tmp_path: Path) -> None:
    """Texts are too long for what config.json declares, 40; RoBERTa has two fewer."""
    build(AFFINE["roberta"]).save_pretrained(tmp_path)
    said = r"max_length 129 exceeds the 38 positions of "
    with pytest.raises(InputsError, match=said):
        lb.compare(tmp_path, ["the ferry"], max_length=129, progress=False)


def test_a_length_that_was_not_asked_for_is_what_the_model_takes(
    bert: Checkpoint, tmp_path: Path
) -> None:
    """Windows and several texts, in a run too, which is found again by what it recorded."""
    story, note = "the ferry is in a clock " * 20, "texts are cut at 40 tokens, the positions of "
    for data in (story, [story, "the keeper"]):
        with pytest.warns(Notice, match=note):
            inputs = prepare(bert, data)
        asked = prepare(bert, data, max_length=40)
        assert torch.equal(inputs.batch["input_ids"], asked.batch["input_ids"])
        assert inputs.preprocessing == asked.preprocessing
    assert not any(note in one for one in prepare(bert, [[3, 4]]).notes)
    ds = lb.compare(bert.name, story, samples=1, bounds="none", out=tmp_path / "run.zarr")
    assert ds["length"].values.tolist() == [40]
    assert any(note in one for one in ds.attrs["notes"])
    assert lb.verify(tmp_path / "run.zarr").ok


def test_errors_about_text(bert: Checkpoint, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    picture().save(tmp_path / "p.png")
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "no_header.csv").write_text("the ferry,a clock\nthe keeper,an island\n")
    cases = [
        ({"data": tmp_path / "no_header.csv"}, "name one of 'the ferry', 'a clock' with column="),
        ({"data": pd.DataFrame([["x", "y"]])}, "name one of 0, 1 with column="),
        ({"data": TEXTS, "max_length": 41}, "exceeds the 40 positions"),
        ({"data": {"input_ids": torch.zeros(1, 50, dtype=torch.long)}}, "exceed the 40 positions"),
        ({"data": empty}, "is empty"),
        ({"data": []}, "empty list"),
        ({"data": [" ", ""]}, "no text in it"),
        ({"data": tmp_path / "latin.txt"}, "not a UTF-8 text file"),
        ({"data": tmp_path / "p.png"}, "reads text"),
        ({"data": [picture()]}, "holds items of type Image"),
        ({"data": picture()}, "data is an image"),
        ({"data": tmp_path / "t.csv"}, "name one of a, b with column="),
        ({"data": tmp_path / "t.csv", "column": "c"}, "has no column 'c'"),
        ({"data": tmp_path / "t.csv", "column": "a"}, "holds int"),
        ({"data": tmp_path / "no.parquet"}, "there is no file"),
        ({"data": 3}, "data is 3"),
        ({"data": {"input_ids": [1, 2]}}, "must be named tensors"),
        (
            {"data": {"input_ids": torch.zeros(2, 3), "attention_mask": torch.zeros(1, 3)}},
            "all with as many samples",
        ),
        ({"data": tmp_path / "no.safetensors"}, "there is no file"),
        ({"samples": 0}, "samples is 0"),
        ({"max_length": 0}, "max_length is 0"),
    ]
    for options, message in cases:
        with pytest.raises(InputsError, match=message):
            prepare(bert, **({"max_length": 40} | options))


def test_errors_about_images(vit: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("words")
    empty = tmp_path / "folder"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "x.png").write_bytes(b"no image")
    for data, message in [
        (tmp_path / "note.txt", "not an image file"),
        (empty, "holds no images"),
        (broken, "not a readable image"),
        (["words"], "holds items of type str"),
    ]:
        with pytest.raises(InputsError, match=message):
            prepare(vit, data)


def test_a_modality_is_one_reader_and_one_entry(
    bert: Checkpoint, vit: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NumberReader(Reader):
        modality = "image"
        item_type, one, many, takes, columns = int, "a number", "numbers", "numbers", ("n",)

        def read(self, checkpoint: Checkpoint, data: object, selection: Selection) -> Inputs:
            found = self.items(checkpoint, data, selection)
            numbers, _ = found.take(selection, "numbers")
            return Inputs({"pixel_values": torch.tensor(numbers)}, found.description)

        def default(self) -> tuple[Iterator[int], str]:
            return iter([0, 2]), "none and two"

        def open_file(self, path: Path, checkpoint: Checkpoint) -> Iterator[int]:
            return iter([int(path.read_text())])

    monkeypatch.setitem(READERS, "image", NumberReader())
    for data, values, description in (
        (None, [0, 2], "none and two"),
        ([5, 6, 7], [5, 6], "3 given numbers"),
        (datasets.Dataset.from_dict({"n": [8, 9, 10]}), [8, 9], "a dataset"),
    ):
        inputs = prepare(vit, data, samples=2)
        assert (inputs.batch["pixel_values"].tolist(), inputs.description) == (values, description)
    with pytest.raises(
        InputsError, match=r"column 'x' of a dataset holds str, but .* takes numbers"
    ):
        prepare(vit, datasets.Dataset.from_dict({"x": ["a"]}), column="x")
    monkeypatch.delitem(READERS, "text")
    with pytest.raises(InputsError, match="takes text; give inputs="):
        prepare(bert)


def test_unreachable_datasets_are_not_waited_for(
    bert: Checkpoint, vit: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` tries for half a minute, unless it is told that there is no hub."""
    hub = Mock()
    hub().dataset_info.side_effect = OSError("no connection")
    monkeypatch.setattr("lipbound.models.readers.reader.HfApi", hub)
    monkeypatch.setattr("datasets.load.CachedDatasetModuleFactory", Mock(side_effect=OSError))
    asked = Mock(side_effect=AssertionError("the hub is asked again"))
    monkeypatch.setattr("datasets.load.HfApi", Mock(return_value=Mock(hf_hub_download=asked)))
    before = datasets.config.HF_HUB_OFFLINE
    said = "data 'news' could not be read, as a file or a hub dataset: the hub cannot be reached"
    with pytest.raises(InputsError) as refused:
        prepare(bert, "news", max_length=40)
    assert str(refused.value) == f"{said}; a text itself is given in a list, ['news'], or in a file"
    with pytest.raises(InputsError, match=f"{said}$"):
        prepare(vit, "news")
    assert datasets.config.HF_HUB_OFFLINE is before
    hub().dataset_info.side_effect = HFValidationError("no id")
    monkeypatch.setattr(datasets, "get_dataset_split_names", hub().dataset_info)
    with pytest.raises(InputsError, match=r"no hub id is like it; a text itself .* \['news!'\]"):
        prepare(bert, "news!", max_length=40)


def test_builtins_lend_their_tokenizers_and_processors(bert: Checkpoint, vit: Checkpoint) -> None:
    lent = load_checkpoint(bert.name, tokenizer="Builtin:gpt2").tokenizer()
    own = load_checkpoint("builtin:gpt2").tokenizer()
    assert lent("the clock")["input_ids"] == own("the clock")["input_ids"]
    there = load_checkpoint(vit.name, processor="builtin:vit").image_processor()
    assert there.size == load_checkpoint("builtin:vit").image_processor().size
    with pytest.raises(CheckpointError, match="unknown builtin checkpoint 'gpt3'; did you mean"):
        load_checkpoint(bert.name, tokenizer="builtin:gpt3")


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "bert")
    plain = load_checkpoint(folder)
    chats = [
        [
            {"role": "user", "content": "the ferry"},
            {"role": "assistant", "content": "is in a clock"},
        ],
        [{"role": "user", "content": "keeper of the island"}],
    ]
    with pytest.raises(InputsError, match="conversations need a chat template"):
        prepare(plain, chats, max_length=12)
    tokenizer = plain.tokenizer()
    tokenizer.chat_template = "[CLS] {% for m in messages %}{{ m['content'] }} [SEP] {% endfor %}"
    tokenizer.save_pretrained(folder)
    checkpoint = load_checkpoint(folder)
    inputs = prepare(checkpoint, chats, samples=2, max_length=12)
    expected = tokenizer(
        ["[CLS] the ferry [SEP] is in a clock [SEP]", "[CLS] keeper of the island [SEP]"],
        add_special_tokens=False,
    )["input_ids"]
    assert [
        row[mask.bool()].tolist()
        for row, mask in zip(inputs.batch["input_ids"], inputs.batch["attention_mask"], strict=True)
    ] == expected
    assert inputs.description == "2 conversations"
    assert prepare(checkpoint, chats, samples=2, max_length=3).batch["input_ids"].shape == (2, 3)
    with pytest.raises(InputsError, match="and messages such as"):
        prepare(checkpoint, [chats[0], "the ferry"], max_length=12)


def test_settings_of_the_forward_pass_are_passed_on() -> None:
    """Images of another size than the model's, which its positions are interpolated for."""
    vit = build(AFFINE["vit"])
    batch = {
        "pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)),
        "interpolate_pos_encoding": True,
    }
    inputs = prepare(load_checkpoint(vit), batch)
    assert inputs.options == {"interpolate_pos_encoding": True}
    assert inputs.fingerprint != Inputs(inputs.batch, "").fingerprint
    ds = lb.compare(vit, batch, bounds=["lipbound"], exact_samples=1, progress=False)
    assert ds.attrs["tokens"] == 37
    with pytest.raises(InputsError, match="smaller is no setting of ViTModel's forward pass"):
        prepare(load_checkpoint(vit), {**batch, "smaller": True})


def test_dynamic_rotary_tables_reach_beyond_the_positions_they_were_made_for() -> None:
    config = tf.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    )
    assert Checkpoint(build(lambda: tf.LlamaModel(config)), "llama", "", None).positions == 160
    assert Checkpoint(build(MODERN["Llama"]), "llama", "", None).positions == 40
