"""Padding belongs to a stream of tokens, and a number to a sample: whatever else is in the batch,
or it is said."""

import warnings

import numpy as np
import pytest
import torch
import transformers as tf
from support import models
from support.models import AFFINE, IDS, LLAMA, MODERN, SEQ2SEQ, TEXT, build, inputs_for
from support.modules import QKV, check, joined, own_norms
from support.oracles import oracle
from support.versions import newer_transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lipbound as lb

SELF_ATTENTION = {
    "bart": "decoder.layers.0.self_attn",
    "t5": "decoder.block.0.layer.0.SelfAttention",
}
"""Of decoders."""
NINE = torch.arange(3, 12).expand(2, -1)
PADDED = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
LEFT = torch.tensor([[1] * 9, [0] * 5 + [1] * 4])
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1.0] * 3, "long_factor": [8.0] * 3}
SOUND = {**models.SMALL, "num_hidden_layers": 1, "num_feat_extract_layers": 2}
SOUND |= {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
SOUND |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


ATTENDED = "tokens that attention_mask marks as padding are attended to, and are measured as tokens"


def silent(model, inputs):
    """A capture of which there is nothing to tell."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", lb.Notice)
        return lb.capture(model, inputs)


class Wide(TorchFunctionMode):
    """Numbers stay in float64 where a model takes its softmax in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0]
        if (kwargs or {}).get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **(kwargs or {}))


def told(model, inputs, words):
    """A capture of which something is told."""
    with pytest.warns(lb.Notice, match=words):
        return lb.capture(model, inputs)


@pytest.mark.parametrize("real", [9, 7], ids=["no mask of the decoder", "a mask of the decoder"])
@pytest.mark.parametrize("family", SELF_ATTENTION)
def test_a_decoder_has_its_own_padding(family, real):
    """Not the encoder's, although both have as many tokens."""
    model = build(SEQ2SEQ[family]).double()
    inputs = {"input_ids": NINE, "decoder_input_ids": NINE + 9, "attention_mask": PADDED}
    if real < 9:
        inputs["decoder_attention_mask"] = torch.tensor([[1] * 9, [1] * real + [0] * (9 - real)])
    encoder, decoder = lb.capture(model, inputs, layers=[0, 1])
    assert encoder.lengths.tolist() == [9, 4]
    assert decoder.lengths.tolist() == [9, real]
    with Wide():
        expected = own_norms(model, SELF_ATTENTION[family], inputs, decoder, 1)
    check(decoder, expected, sample=1, rtol=1e-6, delta=1e-6)
    upper = lb.spectral_norm(decoder, tol=1e-9, delta=1e-6).upper[1]
    assert bool((upper >= expected * (1 - 1e-9)).all())


def test_masks_of_four_axes_without_padding_are_masks():
    model = build(MODERN["Llama"])
    batch = inputs_for(model)
    causal = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    for mask in (causal, causal == 0):
        masked = silent(model, {**batch, "attention_mask": mask})
        for a, b in zip(masked, lb.capture(model, batch), strict=True):
            torch.testing.assert_close(a.out, b.out)


def test_tokens_that_no_query_sees_are_told():
    model = build(MODERN["Llama"])
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)
    mask[:, 8] = torch.finfo(torch.float32).min
    inputs = {**inputs_for(model), "attention_mask": mask.expand(2, 1, -1, -1)}
    words = "0.self_attn and 1 more: no query may attend to some tokens, which are measured as"
    layers = told(model, inputs, words)
    assert layers[0].lengths.tolist() == [9, 9]


def test_padding_that_the_model_attends_to_is_told():
    model = build(AFFINE["bert"])
    model.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    layers = told(model, inputs_for(model, padded=True), ATTENDED)
    assert layers[0].lengths.tolist() == [9, 9]


def test_left_padding_moves_absolute_positions_and_is_told():
    model = build(AFFINE["gpt2"])
    inputs = {"input_ids": NINE, "attention_mask": LEFT}
    with pytest.warns(lb.Notice, match="shares the batch: .*padding moves positions"):
        ds = lb.compare(model, inputs, bounds=["lipbound"], progress=False)
    assert [note for note in ds.attrs["notes"] if "shares the batch" in note]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lb.Notice)
        # a sample at a time
        small = lb.compare(model, inputs, bounds=["lipbound"], memory=1000, progress=False)
    assert small.attrs["block"] == 1
    assert small.attrs["notes"] == ds.attrs["notes"]
    assert small["exact"].values == pytest.approx(ds["exact"].values, rel=1e-4)


@pytest.mark.filterwarnings("ignore:memory is 1 byte")
@pytest.mark.parametrize("exact_samples", [None, 1])
def test_samples_with_different_positions_are_measured_one_by_one(exact_samples):
    """A block of them gives the numbers of blocks of one sample."""
    positions = torch.stack([torch.arange(9), 3 * torch.arange(9)])
    inputs = {"input_ids": NINE, "position_ids": positions}
    options = {"bounds": ["lipbound"], "exact_samples": exact_samples, "progress": False}
    model = build(MODERN["Llama"])
    together = lb.compare(model, inputs, memory="1GB", **options)
    alone = lb.compare(model, inputs, memory=1, **options)
    assert (together.attrs["block"], alone.attrs["block"]) == (2, 1)
    for name in ("exact", "exact_upper", "lipbound", "length"):
        np.testing.assert_array_equal(together[name], alone[name])


def test_padding_that_changes_nothing_is_not_told():
    gpt2, llama = build(AFFINE["gpt2"]), build(MODERN["Llama"])
    left, right = ({"input_ids": NINE, "attention_mask": mask} for mask in (LEFT, PADDED))
    counted = {**left, "position_ids": (LEFT.cumsum(-1) - 1).clamp_min(0)}
    for model, inputs, tokens in (
        (gpt2, counted, slice(5, 9)),
        (gpt2, right, slice(0, 4)),
        (llama, left, slice(5, 9)),
    ):
        own = silent(model, {"input_ids": NINE[1:, tokens]})
        for mine, alone in zip(silent(model, inputs), own, strict=True):
            expected = lb.spectral_norm(alone, tol=1e-6).lower[0]
            check(mine, expected, sample=1, tol=1e-6, rtol=1e-3)


def test_rotary_tables_that_the_longest_text_chooses_are_told():
    inputs = {"input_ids": NINE, "attention_mask": PADDED}
    long = {**LLAMA, **IDS, "original_max_position_embeddings": 6, "rope_parameters": LONGROPE}
    model = build(lambda: tf.Phi3Model(tf.Phi3Config(**long)))
    words = r"head outputs are up to \d+.\d% off \(.* the longest sample decides"
    told(model, inputs, words)
    with pytest.warns(lb.Notice, match=words):
        notes = lb.compare(model, inputs, bounds=["lipbound"], progress=False).attrs["notes"]
    assert "the longest sample decides" in notes[0]
    # none of the two is long
    silent(model, {"input_ids": NINE[:, :6], "attention_mask": PADDED[:, :6]})


DRAWING = newer_transformers("Wav2Vec2 draws random numbers, which is told, and uses none")


@pytest.mark.parametrize("norm", [pytest.param("layer", marks=DRAWING), "group"])
def test_padding_of_sound_is_that_of_its_frames(norm):
    """The mask is of samples of sound, the tokens are frames; a normalisation over time makes the
    rest of the batch matter."""
    config = tf.Wav2Vec2Config(**SOUND, feat_extract_norm=norm)
    model = build(lambda: tf.Wav2Vec2Model(config))
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    sound[1, 200:] = 0
    mask = (torch.arange(400) < torch.tensor([[400], [200]])).long()
    inputs = {"input_values": sound, "attention_mask": mask}
    if norm == "group":
        told(model, inputs, "depend on what shares the batch: .*normalisations over padding")
        return
    found, alone = silent(model, inputs)[0], silent(model, {"input_values": sound[1:, :200]})[0]
    assert found.lengths.tolist() == [18, 8]
    its = lb.spectral_norm(alone, tol=1e-6).lower[0]
    check(found, its, sample=1, tol=1e-6, rtol=1e-4)


@newer_transformers("the towers of CLIP are no models, and the mask of the whole is told of both")
def test_one_model_has_streams_of_text_and_images():
    """With as many tokens each: only the text is padded."""
    parts = {"text_config": {**TEXT, "num_hidden_layers": 1}, "projection_dim": 8}
    parts["vision_config"] = {**models.IMAGE, "num_hidden_layers": 1}
    model = build(lambda: tf.CLIPModel(tf.CLIPConfig(**parts)))
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    g, real = torch.Generator().manual_seed(0), torch.tensor([[17], [10]])
    inputs = {"input_ids": torch.randint(3, 60, (2, 17), generator=g)}
    inputs["attention_mask"] = (torch.arange(17) < real).long()
    inputs["pixel_values"] = torch.randn(2, 3, 16, 16, generator=g)
    model.train().text_model.eval()
    assert sorted(layer.lengths.tolist() for layer in silent(model, inputs)) == [[17, 10], [17, 17]]
    towers = model.config.text_config, model.config.vision_config
    assert [one._attn_implementation for one in towers] == ["eager", "sdpa"]
    assert (model.training, model.text_model.training) == (True, False)


def test_a_text_that_was_seen_before_changes_nothing():
    """Rotary tables that grow with the longest text seen start anew, and are the model's own
    afterwards."""
    config = tf.LlamaConfig(**{**LLAMA, "max_position_embeddings": 4}, rope_parameters=DYNAMIC)
    model = build(lambda: tf.LlamaModel(config))
    before = lb.capture(model, {"input_ids": NINE})[0].out
    model(NINE.repeat(1, 4))
    grown = model.rotary_emb.inv_freq.clone()
    after = lb.capture(model, {"input_ids": NINE})[0].out
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    assert torch.equal(model.rotary_emb.inv_freq, grown)


def test_documents_that_only_a_pass_without_cache_keeps_apart_are_told():
    model = build(MODERN["Llama"])
    inputs = {"input_ids": NINE[:1], "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])}
    layers = told(model, inputs, "position_ids begin again within a sample: without a cache, ")
    assert not bool(layers[0].p[0, :, 5:, :5].any())
    with pytest.warns(lb.Notice, match="position_ids begin again"):
        ds = lb.compare(model, inputs, bounds=["lipbound"], progress=False)
    assert "with one not" in ds.attrs["notes"][0]


def test_nan_of_the_model_is_called_its_own():
    model = build(MODERN["Llama"]).double()
    words = "NaN in the model's own eager pass: in float64 left padding .* take float32"
    with pytest.raises(lb.errors.CaptureError, match=words):
        lb.capture(model, {"input_ids": NINE, "attention_mask": LEFT})
    broken = build(lambda: tf.BertModel(tf.BertConfig(**TEXT)))
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[5] = torch.nan
    words = r"attention.self: the outputs of its heads are NaN in the model's own eager pass$"
    with pytest.raises(lb.errors.CaptureError, match=words):
        lb.capture(broken, {"input_ids": NINE})


class Scored(QKV):
    """Two heads, whose scores are what they are where a tensor is 0, else hidden."""

    def forward(self, x, hidden):
        q, k, v = self.qkv(x)
        return self.o(joined((q @ k.mT / 8**0.5 + hidden).softmax(-1) @ v))


class OwnMask(nn.Module):
    """Takes tokens alone, and hides those that are 1, or does not."""

    def __init__(self, hides):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attend, self.hides = nn.Embedding(20, 16), Scored(16, 2), hides

    def forward(self, tokens):
        hidden = torch.zeros(tokens.shape).masked_fill((tokens == 1) & self.hides, -torch.inf)
        x = self.embed(tokens)
        return self.attend(x, hidden.to(x)[:, None, None])


def test_padding_that_a_model_finds_by_itself_is_said_by_a_mask_that_it_does_not_take():
    model = OwnMask(hides=True).eval()
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9, 2], [0, 5, 6, 7, 2, 1, 1]])
    batch = {"tokens": tokens, "attention_mask": (tokens != 1).long()}
    (alone,) = lb.capture(model, tokens[1:, :5])
    exact = oracle(alone)[0]
    (padded,) = told(model, tokens, "0 in an attention_mask, whether the model takes it")
    assert padded.lengths.tolist() == [7, 7]
    (layer,) = silent(model, batch)
    assert layer.lengths.tolist() == [7, 5]
    ds = lb.compare(model, batch, bounds=[], tol=1e-6, progress=False)
    for mine in (lb.spectral_norm(layer, tol=1e-6).lower[1], torch.tensor(ds.exact[1, 0].values)):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=0)
    (layer,) = told(OwnMask(hides=False).eval(), batch, ATTENDED)
    assert layer.lengths.tolist() == [7, 7]
