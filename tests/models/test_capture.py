"""What is captured of each family, and measured, against the model's own attention module."""

import pytest
import torch
import transformers as tf
from support.models import AFFINE, LLAMA, MODERN, TEXT, build, inputs_for, wide
from support.modules import check, own_norms
from support.oracles import capture_error
from support.reference import dense_jacobian
from support.versions import marked, newer_transformers
from transformers.models.llama import modeling_llama

import lipbound as lb
from lipbound.errors import CaptureError
from lipbound.models.capture.capture import Capturer, capture
from lipbound.models.capture.seeing import interface


@newer_transformers("the eager attention of GPT-2 has a causal mask of its own")
def test_a_capture_without_its_mask_is_noticed(monkeypatch):
    """The second pass through eager attention is what tells: q, k and v alone would agree."""
    model, masks = build(AFFINE["gpt2"]), interface.AttentionMaskInterface._global_mapping
    monkeypatch.setitem(masks, interface.RECORDING_ATTENTION, lambda *args, **kwargs: None)
    with pytest.raises(CaptureError, match="differs from the model's own eager attention"):
        capture(model, inputs_for(model))


def test_layers_can_be_chosen_and_batches_follow():
    model = build(AFFINE["vit"])
    capturer = Capturer(model, [1])
    batch = inputs_for(model)
    first, second = capturer.run({"pixel_values": batch["pixel_values"][:1]}), capturer.run(batch)
    assert len(first) == len(second) == 1
    mine, its = second[0].attention, first[0].attention
    torch.testing.assert_close(mine.out[:1], its.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.x, capture(model, batch)[1].x)
    assert [layer.index for layer in Capturer(model, [-1, 1]).run(batch)] == [1]
    with pytest.raises(CaptureError, match="layers is empty"):
        capture(model, batch, layers=[])
    with pytest.raises(CaptureError, match=r"layers \[7\] do not exist: the model has 2"):
        capture(model, batch, layers=[7])


@pytest.fixture
def altered(monkeypatch):
    """A BERT whose eager attention makes other probabilities of scores and mask."""

    def model(change):
        def forward(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
            p = change(query @ key.transpose(2, 3) * scaling, mask)
            return (p @ value).transpose(1, 2).contiguous(), p

        monkeypatch.setattr(tf.models.bert.modeling_bert, "eager_attention_forward", forward)
        return build(AFFINE["bert"])

    return model


def test_every_sample_is_checked(altered):
    """A model that attends to padding has no closed form, also when the padded sample comes second
    or in a later block."""
    model = altered(lambda s, m: torch.softmax(s if m is None else s + m.clamp_min(-1), -1))
    batch = inputs_for(model, padded=True)
    for layer in capture(model, batch):
        assert "differ from the model's own" in layer.reason
    capturer = Capturer(model)
    capturer.run({name: t[:1] for name, t in batch.items()})
    for found in capturer.run(batch):
        assert "differ from the model's own" in found.attention.reason


def test_a_loud_head_does_not_hide_a_wrong_one(altered):
    def change(s, m):
        p = torch.softmax(s, -1)
        return torch.cat([p[:, :1], torch.softmax(-3 * s[:, 1:2] ** 2, -1), p[:, 2:]], 1)

    model = altered(change)
    with torch.no_grad():
        model.encoder.layer[0].attention.self.value.weight[:6] *= 1e5
    assert "differ from the model's own" in capture(model, inputs_for(model))[0].reason


@newer_transformers("Doge fails where torch has no flex_attention")
def test_what_depends_on_the_tokens_beside_queries_and_keys_has_no_closed_form():
    """A bias made of the tokens agrees in every forward pass, and would be missed in the
    derivative."""
    # passes its mask by keyword
    doge = build(lambda: tf.DogeModel(tf.DogeConfig(**TEXT, num_key_value_heads=2)))
    torch.nn.init.normal_(doge.layers[0].self_attn.A)
    assert "adds other products of its tokens" in capture(doge, inputs_for(doge))[0].reason


def test_inputs_that_are_no_tensors_pass_through():
    model = build(MODERN["Llama"])
    batch = inputs_for(model)
    layers = capture(model, {**batch, "output_attentions": True, "attention_mask": None})
    torch.testing.assert_close(layers[0].out, capture(model, batch)[0].out)


def test_positions_that_differ_between_samples_are_refused():
    model = build(MODERN["Qwen 3"])
    positions = torch.arange(9).expand(2, -1).clone()
    layers = capture(model, {**inputs_for(model), "position_ids": positions + 5})
    plain = lb.spectral_norm(capture(model, inputs_for(model))[0], tol=1e-6).lower
    check(layers[0], plain, sample=slice(None), tol=1e-6, rtol=1e-4)
    positions[1] += torch.arange(9)
    with pytest.raises(CaptureError, match="is given samples of different positions"):
        capture(model, {**inputs_for(model), "position_ids": positions})


class Backwards(modeling_llama.LlamaAttention):
    """Turns its tokens the other way."""

    def forward(self, hidden_states, position_embeddings, *args, **kw):
        cos, sin = position_embeddings
        return super().forward(hidden_states, (cos, -sin), *args, **kw)


def test_layers_share_a_rotation_that_turns_their_own_vectors():
    """Not where the same position embeddings do something else."""
    model = build(MODERN["Llama"])
    capturer = Capturer(model)
    first, other = (layer.attention.rotation for layer in run(capturer, 9))
    assert first is other
    assert {layer.attention.rotation.tokens for layer in run(capturer, 7)} == {7}
    model.layers[1].self_attn.__class__ = Backwards
    turned, back = (layer.attention.rotation for layer in run(Capturer(model), 9))
    assert torch.equal(turned.sin, first.sin)
    torch.testing.assert_close(back.sin, -first.sin, rtol=1e-5, atol=1e-6)


def run(capturer, length):
    return capturer.run(inputs_for(capturer.model, length=length))


class Shortened(tf.LlamaForCausalLM):
    """One whose layers see no other tokens than those whose logits are asked for."""

    def forward(self, input_ids, logits_to_keep=0):
        return self.lm_head(self.model(input_ids[:, -logits_to_keep:])[0])


@pytest.mark.parametrize("kind", [tf.LlamaForCausalLM, Shortened])
def test_logits_that_nobody_reads_are_left_out_and_no_tokens(kind):
    model = build(lambda: kind(tf.LlamaConfig(**LLAMA)))
    lengths = []
    model.lm_head.register_forward_hook(lambda m, given, out: lengths.append(out.shape[1]))
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    both = (capture(one, {"input_ids": ids}) for one in (model, model.model))
    for mine, own in zip(*both, strict=True):
        assert all(torch.equal(getattr(mine, k), getattr(own, k)) for k in ("x", "w_q", "p"))
    assert set(lengths) == {9 if kind is Shortened else 1}
    if kind is not Shortened:  # a loss is made of all of them
        capture(model, {"input_ids": ids, "labels": ids})
        assert lengths[-1] == 9


NORMALISED = ("Qwen 3", "Gemma 3", "Phi, q/k-norm", "OLMo 2", "Cohere", "Llama 4")
HAS = {
    **{name: {"rotation", "qk_norm"} for name in (*NORMALISED, "StableLM, q/k-norm")},
    **{"Gemma 2": {"rotation", "cap"}, "gpt-oss": {"rotation", "sinks"}},
    **{"GPTBigCode": set(), "T5 encoder": set()},
}
ALL = {**AFFINE, **MODERN}
DENSE = ("bert", "roberta", "gpt2", "vit", "dinov2", "albert", "opt", *MODERN)
COMMON = ("bert", "gpt2", "vit", "opt", "Llama, YaRN", "Mistral", "Qwen 3", "Gemma 2")
COMMON += ("Phi, q/k-norm", "gpt-oss", "ModernBERT", "T5 encoder")
"""One of every kind of attention among them."""


LATER = {"gpt2 scaled by layer": "GPT-2 scales in the function it calls"}


@pytest.mark.parametrize("family", marked(ALL, LATER))
def test_captured(family):
    model = build(ALL[family])
    before = model.config._attn_implementation
    layers = Capturer(model, range(2)).run(inputs_for(model))  # vision towers may pool, too
    for layer in layers:
        att = layer.attention
        assert layer.error < capture_error(att)
        assert att.heads == 4
        assert att.w_o is not None
        # its layers of full attention are not turned
        plain = family in AFFINE or (family == "Cohere 2" and layer.index == 1)
        assert att.variants == (set() if plain else HAS.get(family, {"rotation"}))
    assert model.config._attn_implementation == before
    if "sliding_window" in model.config.to_dict() and model.config.sliding_window == 4:
        p = layers[0].attention.p
        assert bool((p[..., 8, :4] == 0).all())  # the window hides what is farther


@pytest.mark.each_value(family=COMMON)
@pytest.mark.parametrize(
    "family", marked(DENSE, {"T5 encoder": "the softmax of its module is in float32"})
)
def test_jacobian_is_that_of_the_models_own_module(family):
    """Dense SVD of autograd through the model's eager attention module, in float64, against ours;
    every sound bound is above it."""
    model = build(ALL[family]).double()
    inputs = wide(inputs_for(model))
    (layer,) = Capturer(model, [1]).run(inputs)
    att, sigma = layer.attention, own_norms(model, layer.name, inputs, layer.attention)
    check(att, sigma, rtol=1e-6)
    own = [torch.linalg.matrix_norm(dense_jacobian(att, 0, h), 2) for h in range(att.heads)]
    torch.testing.assert_close(torch.stack(own), sigma, rtol=1e-6, atol=0)
    for name in lb.bounds.names():
        bound = lb.bounds.get(name)
        if bound.map == "head" and bound.applies(att):
            value, sound = bound(att)[0], bound.sound(att)[0]
            assert bool((value[sound] >= sigma[sound] * (1 - 1e-6)).all()), name
    assert lb.bounds.get("lipbound").applies(att)


PADDED = ("bert", "roberta", "gpt2", "opt", "distilbert")
PADDED += ("Llama", "Qwen 3", "Gemma 2", "gpt-oss", "OLMo 2")


@pytest.mark.parametrize("family", PADDED)
def test_padding_is_left_out(family):
    model = build(ALL[family])
    batch = inputs_for(model, padded=True)
    short = capture(model, {name: t[1:, :6] for name, t in batch.items()})
    for padded, alone in zip(capture(model, batch), short, strict=True):
        assert padded.lengths.tolist() == [9, 6]
        assert (padded.mask is None) == (family in ("bert", "roberta", "distilbert"))
        torch.testing.assert_close(padded.out[1:, :, :6], alone.out, rtol=1e-4, atol=1e-5)
        its = lb.spectral_norm(alone, tol=1e-6).lower[0]
        check(padded, its, sample=1, tol=1e-6, rtol=1e-4)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "gpt-oss")]


@pytest.mark.parametrize("family", ["Qwen 3", "Gemma 2", *SLOW])
def test_compare(family, tmp_path):
    model = build(MODERN[family])
    options = {"out": tmp_path / "run.zarr", "resume": True, "progress": False}
    ds = lb.compare(model, inputs_for(model), **options)
    assert set(ds.attrs["variants"]) == HAS.get(family, {"rotation"})
    assert "lipbound" in ds.attrs["bounds"]
    assert "kim" not in ds
    assert ds.attrs["not_applicable"]["kim"].startswith("does not cover rotary position embeddings")
    assert ("yudin" in ds) == (family in ("Llama", "Gemma 2"))
    assert all(entry["broken"] == 0 for entry in ds.attrs["audit"].values())
    assert not (set(ds.attrs["bounds"]) & set(ds.attrs["not_applicable"]))
    assert "left out (Kim 2021" in lb.tables.methods(ds, "text")
    assert "left out, since the statement does not cover" in lb.tables.render(ds)
    # although the bounds that were asked for are more than those that apply
    assert lb.compare(model, inputs_for(model), **options)["exact"].equals(ds["exact"])
    with pytest.raises(lb.LipboundError, match=r"'kim' does not cover rotary .*leave it out"):
        lb.compare(model, inputs_for(model), bounds=["kim", "lipbound"], progress=False)
