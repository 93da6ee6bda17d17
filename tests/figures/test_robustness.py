"""Attacks: against what can be worked out by hand, and against each other."""

import math

import pytest
import torch
import transformers as tf
from robustness import embedding_accuracy, robust_accuracy
from support.models import IMAGE, TEXT, build
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from lipbound.errors import LipboundError

NORMAL = {"mean": [0.5] * 3, "std": [0.5] * 3}


@pytest.fixture(scope="module")
def trained():
    """A tiny ViT that tells bright from dark images, and 32 of them."""
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(**IMAGE, num_labels=2)).train()
    g = torch.Generator().manual_seed(0)
    images = torch.rand(32, 3, 16, 16, generator=g) * 0.5
    images[::2] += 0.3
    labels = torch.arange(32) % 2
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(pixel_values=(images - 0.5) / 0.5).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), images, labels


@pytest.mark.slow
def test_pixel_attacks_are_ordered(trained):
    attacks = ["clean", "fgsm-2", "pgd-2", "pgd-60", "fgsm-60", "autoattack-60"]
    found = robust_accuracy(*trained, **NORMAL, attacks=attacks)
    assert found["clean"] == 100
    assert found["clean"] >= found["fgsm-2"] >= found["fgsm-60"]
    assert found["pgd-2"] >= found["pgd-60"] >= found["autoattack-60"]
    assert found["pgd-60"] < 60
    again = robust_accuracy(*trained, **NORMAL, attacks=("pgd-60",))
    assert again["pgd-60"] == found["pgd-60"]
    far = robust_accuracy(*trained, **NORMAL, attacks=("pgd-0.01", "pgd-20"), norm="l2")
    assert far["pgd-0.01"] == 100
    assert far["pgd-20"] < 60


def test_fgsm_moves_every_pixel_by_the_budget(trained):
    """The accuracy is that of one step along the sign of the gradient, done by hand."""
    model, images, labels = trained
    for budget in (10, 30, 50):
        x = images.clone().requires_grad_()
        nn.functional.cross_entropy(model(pixel_values=(x - 0.5) / 0.5).logits, labels).backward()
        moved = (images + budget / 255 * x.grad.sign()).clamp(0, 1)
        right = model(pixel_values=(moved - 0.5) / 0.5).logits.argmax(-1) == labels
        found = robust_accuracy(*trained, **NORMAL, attacks=(f"fgsm-{budget}",))
        assert found[f"fgsm-{budget}"] == pytest.approx(100 * float(right.double().mean()))


class Linear(tf.PreTrainedModel):
    """A network whose attacks can be worked out: blocks that do nothing, then a linear map of the
    mean token."""

    config_class = tf.BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([nn.Identity() for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids, attention_mask=None, **_):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        weights = torch.ones_like(x[..., :1])
        weights = weights if attention_mask is None else attention_mask[..., None].to(x.dtype)
        return SequenceClassifierOutput(logits=self.head((x * weights).sum(1) / weights.sum(1)))


def test_linear_network_is_attacked_exactly_at_its_margin():
    torch.manual_seed(0)
    model = Linear(tf.BertConfig(**TEXT))
    inputs = {"input_ids": torch.randint(3, 60, (12, 5))}
    with torch.no_grad():
        logits = model(**inputs).logits
    labels = logits.argmax(-1)
    w = model.head.weight[0] - model.head.weight[1]
    slope = float(w.norm()) / math.sqrt(5)  # the mean over five tokens
    radius = (logits[:, 0] - logits[:, 1]).abs().double() / slope
    for quantile in (0.3, 0.7):
        size = float(radius.quantile(quantile)) * 1.001
        found = embedding_accuracy(model, inputs, labels, size)
        expected = 100 * float((radius > size).double().mean())
        assert found["clean"] == 100
        assert found["first_order"] == pytest.approx(expected)
        assert found["gradient"] == pytest.approx(expected)
        assert found["pgd"] == pytest.approx(expected)
        # along another direction than the difference of logits
        assert found["singular"] >= expected


def test_text_classifier_and_padding():
    model = build(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=3)))
    inputs = {
        "input_ids": torch.randint(3, 60, (6, 9), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.ones(6, 9, dtype=torch.long),
    }
    inputs["attention_mask"][1::2, 6:] = 0
    with torch.no_grad():
        labels = model(**inputs).logits.argmax(-1)
    near, far = (embedding_accuracy(model, inputs, labels, radius) for radius in (1e-4, 20.0))
    assert all(value == 100 for value in near.values())
    assert far["pgd"] < 100
    for radius in (0.01, 0.1, 0.3, 1.0, 3.0):
        padded, alone = (
            embedding_accuracy(
                model, {name: t[1:2, :n] for name, t in inputs.items()}, labels[1:2], radius
            )
            for n in (9, 6)
        )
        for name in ("singular", "gradient", "first_order"):
            assert padded[name] == alone[name]


def test_bad_requests(trained):
    model, images, labels = trained
    for pixels, options, message in (
        (images, {"attacks": ("cw-2",)}, "unknown attack 'cw-2'"),
        (images * 2, {}, "before normalisation"),
        (images, {"norm": "l1"}, "'linf' or 'l2'"),
    ):
        with pytest.raises(LipboundError, match=message):
            robust_accuracy(model, pixels, labels, **NORMAL, **options)
    with pytest.raises(LipboundError, match="must be positive"):
        embedding_accuracy(model, {"pixel_values": images}, labels, 0.0)
