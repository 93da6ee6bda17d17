"""What is handed over is taken apart in one place, whatever it is handed to."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from support.models import AFFINE, TEXT, build, inputs_for, save_bert, save_tokenizer
from support.versions import newer_torch
from torch import nn

import lipbound as lb
from lipbound.errors import CheckpointError, Notice


class PeftLike(nn.Module):
    """What PEFT's models say of themselves."""

    def __init__(self, model, learns_prompts):
        super().__init__()
        self.base_model = model
        self.peft_config = {
            "default": SimpleNamespace(peft_type="PREFIX_TUNING", is_prompt_learning=learns_prompts)
        }

    def get_base_model(self):
        return self.base_model


class Mine(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(24, 2)


class Encoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.auto_model = model


WRAPPED = {
    "DataParallel": (nn.DataParallel, ""),
    "compiled, in parallel": (lambda model: torch.compile(nn.DataParallel(model)), ""),
    "PEFT": (lambda model: PeftLike(model, False), ""),
    "learned prompts": (
        lambda model: PeftLike(model, True),
        r"learned in front of its inputs \(PREFIX_TUNING\) are left out",
    ),
    "sentence encoder": (
        lambda model: nn.Sequential(Encoder(model), nn.Flatten()),
        r"the transformer of the Sequential \(Flatten\) is left out",
    ),
    "a module of the user's": (Mine, "the BertModel inside the Mine is measured"),
    "a checkpoint": (lb.load_checkpoint, ""),
}


@pytest.fixture(scope="module")
def plain():
    """A model without a wrapper, and what is measured of it."""
    model = build(AFFINE["bert"])
    inputs = inputs_for(model)
    exact = lb.compare(model, inputs, bounds=["lipbound"], progress=False)["exact"].values
    norm = lb.network_norm(model, inputs, end=0).lower
    return model, inputs, lb.capture(model, inputs), norm, exact


COMPILED = newer_torch("2.6", "running a compiled model as it is written")


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[COMPILED] * how.startswith("compiled")) for how in WRAPPED]
)
def test_every_entry_takes_wrappers(how, plain):
    model, inputs, own, own_norm, own_exact = plain
    wrap, sentence = WRAPPED[how]
    wrapped = wrap(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        layers = lb.capture(wrapped, inputs)
        norm = lb.network_norm(wrapped, inputs, end=0)
        ds = lb.compare(wrapped, inputs, bounds=["lipbound"], progress=False)
    notices = [str(one.message) for one in told if issubclass(one.category, Notice)]
    assert len(notices) == (3 if sentence else 0)
    assert all(torch.equal(a.p, b.p) for a, b in zip(layers, own, strict=True))
    assert torch.equal(norm.lower, own_norm)
    assert np.array_equal(ds["exact"], own_exact)
    assert not sentence or (re.search(sentence, notices[0]) and notices[0] in ds.attrs["notes"])
    with lb.attention_probabilities(wrapped) as found:
        model(**inputs)
    assert len(found) == 2


def test_pipelines_and_sentence_transformers(tmp_path):
    folder = tmp_path / "classifier"
    build(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT))).save_pretrained(folder)
    save_tokenizer(folder)
    ids = {"input_ids": torch.tensor([[2, 7, 8, 3]])}
    pipeline = tf.pipeline("text-classification", model=str(folder))
    mine, expected = (lb.capture(one, ids)[0].p for one in (pipeline, lb.load_checkpoint(folder)))
    assert torch.equal(mine, expected)
    encoders = pytest.importorskip("sentence_transformers")
    encoder = encoders.SentenceTransformer(str(save_bert(tmp_path / "encoder")), device="cpu")
    with pytest.warns(Notice, match=r"what comes after .* SentenceTransformer \(Pooling\) is left"):
        found = lb.capture(encoder, ids)
    assert torch.equal(found[0].p, lb.capture(lb.load_checkpoint(tmp_path / "encoder"), ids)[0].p)


def test_checkpoints_and_inputs_of_ours(tmp_path):
    checkpoint = lb.load_checkpoint(save_bert(tmp_path))
    inputs = lb.prepare(checkpoint, ["the ferry", "a clock of the island"], samples=2, max_length=8)
    by_hand = lb.capture(checkpoint.model, inputs.batch)
    assert torch.equal(lb.capture(checkpoint, inputs)[1].p, by_hand[1].p)
    assert lb.network_norm(checkpoint, inputs, end="last_hidden_state").lower.shape == (2,)
    ds = lb.compare(checkpoint, inputs, bounds=["lipbound"], progress=False)
    said = {"model": str(tmp_path), "revision": checkpoint.revision, "data": inputs.description}
    said |= {"data_fingerprint": inputs.fingerprint}
    assert said.items() <= ds.attrs.items()
    assert len(lb.prepare(checkpoint, inputs, samples=1).batch["input_ids"]) == 1
    assert lb.verify(ds, model=checkpoint, data=inputs).ok
    words = f"{str(tmp_path)!r}, BertModel, float32, {checkpoint.revision[:19]}"
    assert repr(checkpoint) == f"Checkpoint({words})"
    assert repr(inputs) == f"Inputs(input_ids (2, 5), attention_mask (2, 5); {inputs.description})"


def test_dynamic_int8_is_refused_where_derivatives_would_be_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dynamic = torch.ao.quantization.quantize_dynamic
        model = dynamic(build(AFFINE["bert"]), {nn.Linear}, dtype=torch.qint8)
    for measure in (
        lb.capture,
        lambda m, i: lb.network_norm(m, i, end="last_hidden_state"),
        lambda m, i: lb.compare(m, i, progress=False),
    ):
        words = r"encoder\.layer\.0\.attention\.self\.query\S* is quantized, and has no true deriv"
        with pytest.raises(CheckpointError, match=words):
            measure(model, inputs_for(model))


def test_a_module_of_the_users_keeps_its_mode():
    """It is measured as in evaluation, without dropout."""
    module = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.5, batch_first=True).train()
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    options = {"bounds": ["lipbound"], "progress": False}
    training = lb.compare(module, {"src": x}, **options)
    assert all(part.training for part in module.modules())
    evaluated = lb.compare(module.eval(), {"src": x}, **options)
    assert np.array_equal(training["exact"], evaluated["exact"])
    assert not any(part.training for part in module.modules())
