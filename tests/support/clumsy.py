"""What clumsy hands give: broken files of every kind, one folder of them for a session."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.models import AFFINE, build, model_of, save_tokenizer

import lipbound as lb
from lipbound.runs import store

Change = Callable[[str, torch.Tensor], torch.Tensor]
"""What becomes of a weight."""


def texts(folder: Path) -> None:
    """Texts, tables and pictures that cannot be read, or hold something else than they should."""
    files = {"file": b"a file", "empty.txt": b" \n", "latin.txt": b"caf\xe9 " * 9, "empty.csv": b""}
    files |= {"binary.bin": bytes(range(256)), "header.csv": b"text,label\n", "empty.jsonl": b""}
    files |= {"ragged.csv": b'text,label\na,1\nb,2,3,4\n"c\n', "numbers.csv": b"a,b\n1,2\n3,4\n"}
    files |= {"two.csv": b"x,y\nhello,there\nmore,words\n", "blank.csv": b"text,l\n,1\n,2\n"}
    files |= {"broken.parquet": b"PAR1 nothing", "broken.json": b'{"text": ["a",'}
    files |= {"numbers.json": b"[1, 2, 3]"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    pd.DataFrame({"text": pd.Series([], dtype=str)}).to_parquet(folder / "empty.parquet")
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    for name in ("empty", "pictures", "no-pictures", "half-a-picture"):
        (folder / name).mkdir()
    picture.save(folder / "picture.png")
    picture.save(folder / "pictures" / "a.png")
    (folder / "no-pictures" / "a.png").write_bytes(b"no image")
    whole = (folder / "picture.png").read_bytes()
    (folder / "half-a-picture" / "a.png").write_bytes(whole[: len(whole) // 2])


def tensors(folder: Path) -> None:
    """Ready inputs that are none."""
    ids = torch.arange(3, 15).view(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    given = {
        "keys": {"foo": ids},
        "vocabulary": {"input_ids": ids * 100},
        "negative": {"input_ids": ids - 9},
        "floats": {"input_ids": ids.float()},
        "long": {"input_ids": torch.ones(1, 50, dtype=torch.long)},
        "one-axis": {"input_ids": torch.arange(5)},
        "three-axes": {"input_ids": ids[None].repeat(2, 1, 1)},
        "mask": {"input_ids": ids, "attention_mask": mask[:, :4].clone()},
        "padding": {"input_ids": ids, "attention_mask": 0 * mask},
        "types": {"input_ids": ids, "token_type_ids": ids.clone()},
        "mask-alone": {"attention_mask": mask},
        "no-tokens": {"input_ids": ids[:, :0].clone()},
        "extra": {"input_ids": ids, "colour": ids.clone()},
        "unequal": {"input_ids": ids, "attention_mask": mask[:1].clone()},
        "channels": {"pixel_values": torch.randn(2, 1, 16, 16)},
        "size": {"pixel_values": torch.randn(2, 3, 32, 32)},
        "bytes": {"pixel_values": torch.ones(2, 3, 16, 16, dtype=torch.uint8)},
        "nan": {"pixel_values": torch.full((1, 3, 16, 16), torch.nan)},
    }
    for name, named in given.items():
        save_file(named, folder / f"{name}.safetensors")
    (folder / "broken.safetensors").write_bytes(b"nothing")


def checkpoints(folder: Path, bert: Path, vit: Path) -> None:
    """Copies of good checkpoints, each with one thing wrong."""

    def spoilt(name: str, spoil: Callable[[Path], object], of: Path = bert) -> None:
        shutil.copytree(of, folder / name)
        spoil(folder / name)

    def config(**changes: object) -> Callable[[Path], object]:
        return lambda path: (path / "config.json").write_text(
            json.dumps(json.loads((path / "config.json").read_text()) | changes)
        )

    def weights(change: Change) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            file = path / "model.safetensors"
            changed = {name: change(name, t) for name, t in load_file(file).items()}
            save_file(changed, file, metadata={"format": "pt"})

        return write

    def write(name: str, content: str) -> Callable[[Path], object]:
        return lambda path: (path / name).write_text(content)

    def fewer_words(path: Path) -> None:
        config(vocab_size=10)(path)
        weights(lambda name, t: t[:10].clone() if "word_embeddings" in name else t)(path)

    def wordless(path: Path) -> None:
        for file in path.glob("*token*"):
            file.unlink()

    convolutions = model_of("ResNet", embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    spoilt("no-tokenizer", wordless)
    spoilt("no-processor", lambda path: (path / "preprocessor_config.json").unlink(), of=vit)
    spoilt("bad-tokenizer", write("tokenizer.json", "{"))
    spoilt("bad-config", write("config.json", "{nothing"))
    spoilt("list-config", write("config.json", "[1]"))
    spoilt("empty-config", write("config.json", "{}"))
    spoilt("unknown-type", config(model_type="mystery"))
    spoilt("odd-heads", config(num_attention_heads=5))
    spoilt("fewer-words", fewer_words)
    spoilt("no-weights", lambda path: (path / "model.safetensors").unlink())
    spoilt("resnet", lambda path: build(convolutions).save_pretrained(path), of=vit)
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    build(AFFINE["bert"], seed=5).save_pretrained(folder / "other")
    save_tokenizer(folder / "other")


def runs(folder: Path, bert: Path, text: Path) -> None:
    """Stores that are no runs, and runs that cannot be computed again."""
    options = {"max_length": 8, "bounds": ["yudin", "castin"], "samples": 2, "progress": False}
    ds = lb.compare(bert, text, out=folder / "run.zarr", **options)
    (folder / "strange.zarr").mkdir()
    (folder / "strange.zarr" / "zarr.json").write_text("{")
    source = ds.attrs["source"] | {"model": str(folder / "gone")}
    store.save(ds.assign_attrs(source=source), folder / "moved.zarr")


def sweeps(folder: Path, bert: Path, text: Path) -> None:
    """Sweep files; ``NAME.yaml`` of each."""
    base = f"model: {bert}\ndata: {text}\nsamples: 1\nbounds: castin\n"
    contents = {
        "broken": "model: [",
        "program": "model: !!python/object/apply:os.system ['exit 3']\n",
        "good": f"{base}max_length: 8\n",
        "samples": base.replace("samples: 1", "samples: many"),
        "tol": f"{base}tol: small\n",
        "delta": f"{base}delta: 5\n",
        "length": f"{base}max_length: long\n",
        "number": "model: 3\n",
        "mapping": "model: {a: 1}\n",
        "layers": f"{base}max_length: 8\nlayers: 5-3\n",
    }
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(content)


def mess(folder: Path, bert: Path, vit: Path, text: Path) -> Path:
    """All of it."""
    texts(folder)
    tensors(folder)
    checkpoints(folder, bert, vit)
    runs(folder, bert, text)
    sweeps(folder, bert, text)
    return folder
