"""What capture cannot take, or does not see: one sentence that names the layer and the true reason,
and a model that is left as it was; models and inputs of other makes."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from support.checks import refused
from support.models import AFFINE, GPT2, IDS, IMAGE, LLAMA, MODERN, NARROW, build, inputs_for
from support.versions import marked
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lipbound as lb
from lipbound.errors import CaptureError, CheckpointError, LipboundError, Notice
from lipbound.models.capture import capture as capturing
from lipbound.models.capture import verification
from lipbound.models.capture.seeing.interface import eager
from lipbound.regularizers import JaSMin

PIXELS = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
TWICE = "DiffLlamaAttention calls attention 2 times whenever it runs"
CHANGED = "BitNetAttention changes its head outputs before they are projected"
BLIND = "its mask forbids some token every key (its sliding window is 0 tokens wide)"
PAIR = "its normalisation ZayaQKNorm is of unknown make: it takes more than one tensor"
NO_WINDOW = {**NARROW, "sliding_window": 0}
REASONS = {
    "two softmaxes": (lambda: tf.DiffLlamaModel(tf.DiffLlamaConfig(**LLAMA)), TWICE),
    "normalised heads": (lambda: tf.BitNetModel(tf.BitNetConfig(**LLAMA, **IDS)), CHANGED),
    "a window of nothing": (lambda: tf.MistralModel(tf.MistralConfig(**NO_WINDOW)), BLIND),
    "a norm of two tensors": (lambda: tf.ZayaModel(tf.ZayaConfig(**LLAMA, **IDS)), PAIR),
}
LACKING = {
    "two softmaxes": "DiffLlama has both in one, and its outputs are changed",
    "a norm of two tensors": "no Zaya",
}


@pytest.mark.parametrize("kind", marked(REASONS, LACKING))
def test_the_reason_is_the_true_one(kind):
    """Why a layer has no closed form, or why it cannot be measured at all."""
    make, reason = REASONS[kind]
    model = build(make)
    told = re.escape(reason.partition("Attention ")[2] or reason)
    with pytest.warns(Notice, match="by automatic differentiation.*: .*" + told):
        layers = lb.capture(model, inputs_for(model))
    assert all(reason in one.reason for one in layers if isinstance(one, lb.ModuleAttention))
    assert any(isinstance(layer, lb.ModuleAttention) for layer in layers)


class Reading(nn.Module):
    """Normalises by the weights of another module, which it does not call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return nn.functional.layer_norm(x, (8,), self.norm.weight)


def test_norms_and_positions_of_an_unknown_make():
    model = build(MODERN["Qwen 3"])
    model.layers[1].self_attn.q_norm = Reading()
    layers = lb.capture(model, inputs_for(model))
    assert isinstance(layers[0], lb.Attention)
    assert "LayerNorm is of unknown make: the layer itself reads its weight" in layers[1].reason
    model = build(MODERN["Llama"])

    class Pair(tuple):
        """Cosines, sines, and something else."""

        def __iter__(self):
            return iter(tuple.__getitem__(self, slice(0, 2)))

    model.rotary_emb.register_forward_hook(lambda module, args, found: Pair((*found, 3)))
    reason = lb.capture(model, inputs_for(model))[0].reason
    assert "positions of unknown make (Pair)" in reason


class Convolution(nn.Linear):
    """A projection of each token and the one before."""

    def forward(self, x):
        return super().forward(x + x.roll(1, dims=1))


def test_projections_of_several_tokens():
    model = build(MODERN["Llama"])
    mine = Convolution(24, 24)
    mine.load_state_dict(model.layers[1].self_attn.q_proj.state_dict())
    model.layers[1].self_attn.q_proj = mine
    reason = lb.capture(model, inputs_for(model))[1].reason
    assert "queries are not one affine map of the layer's tokens" in reason


def test_how_arguments_are_passed_makes_no_difference():
    """Position embeddings by position, and one tensor for queries, keys and values."""
    model = build(MODERN["Llama"])
    expected = lb.capture(model, inputs_for(model))

    def by_position(module, args, kwargs):
        args = args or (kwargs.pop("hidden_states"),)
        return (*args, kwargs.pop("position_embeddings"), kwargs.pop("attention_mask")), kwargs

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(by_position, with_kwargs=True)
    for a, b in zip(lb.capture(model, inputs_for(model)), expected, strict=True):
        torch.testing.assert_close(a.out, b.out)
        assert a.variants == {"rotation"}
    ctrl = build(lambda: tf.CTRLModel(tf.CTRLConfig(**GPT2, dff=32)))
    assert len(lb.capture(ctrl, inputs_for(ctrl))) == 2


def test_the_eager_function_is_the_one_that_the_module_names():
    """Of two in one file, and of the file of a base class."""
    config = tf.Phi4MultimodalVisionConfig(**{**IMAGE, "num_hidden_layers": 1}, crop_size=16)
    model = build(lambda: tf.Phi4MultimodalVisionModel(config))
    attention = model.encoder.layers[0].self_attn
    assert eager(attention).__name__ == "simple_eager_attention_forward"
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    layers = lb.capture(model, {**PIXELS, "patch_attention_mask": mask})
    assert isinstance(layers[0], lb.Attention)
    assert [one.perturbed for one in layers[1:]] == ["memory"]  # of a head with a query of its own

    class Mine(tf.models.bert.modeling_bert.BertSelfAttention):
        """Defined in a file without an eager function."""

    bert = build(AFFINE["bert"])
    bert.encoder.layer[0].attention.self.__class__ = Mine
    assert len(lb.capture(bert, inputs_for(bert))) == 2


SEEN = ("bert", "gpt2", "vit", "Llama", "gpt-oss", "Llama 4", "T5 encoder")


@pytest.mark.filterwarnings("error::lipbound.errors.Notice")
@pytest.mark.parametrize("family", SEEN)
def test_nothing_is_told_where_all_is_seen(family):
    """Routers of experts have a softmax too."""
    model = build({**AFFINE, **MODERN}[family])
    lb.capture(model, inputs_for(model))


def state_of(model):
    """What capture changes while it works."""
    modules = [*model.modules()]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in modules]
    names = [m.config._attn_implementation for m in modules if hasattr(m, "config")]
    return [[(type(m), m.training) for m in modules], hooks, names, *model.buffers()]


@pytest.mark.parametrize("step", ["probe", "check_rebuilt", "check_pass", "dependence", "forward"])
def test_the_model_is_left_as_it_was_after_an_error(step, monkeypatch):
    model = build(MODERN["Mistral"]).train()
    model.layers[0].eval()
    model.set_attn_implementation("sdpa")
    before, inputs = copy.deepcopy(state_of(model)), inputs_for(model, padded=True)
    if step == "forward":
        inputs["input_ids"] = inputs["input_ids"] + 60
    else:

        def fail(*args, **kwargs):
            raise LipboundError("broken")

        monkeypatch.setattr(capturing if step == "probe" else verification, step, fail)
    with pytest.raises(LipboundError, match=r"broken|cannot compute with these inputs"):
        lb.capture(model, inputs)
    for one, other in zip(state_of(model), before, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


X = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(0))


class OwnAttention(nn.Module):
    """Two heads."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x).unflatten(-1, [2, 8]).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


TRACED = {
    "trace": lambda module: torch.jit.trace(module, X),
    "script": torch.jit.script,
    "export": lambda module: torch.export.export(module, (X,)),
    "module of export": lambda module: torch.export.export(module, (X,)).module(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", TRACED.values(), ids=TRACED)
def test_traced_programs_are_refused(made):
    program = made(OwnAttention().eval())
    words = "a traced program ", "give the module that it was"
    refused(lambda: lb.capture(program, X), *words, error=CaptureError)
    refused(lambda: lb.compare(program, {"x": X}), *words, error=CaptureError)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_part_of_a_model_is_named():
    plain = OwnAttention().eval()
    model = nn.Sequential(plain, torch.jit.trace(plain, X))
    with pytest.warns(Notice, match=r"left out, in 1 module: 1 \(TopLevelTracedModule\) of Seq"):
        assert len(lb.capture(model, X)) == 1
    lb.capture(torch.fx.symbolic_trace(plain), X)  # runs as it is written


def test_weights_that_are_made_of_other_tensors_are_refused():
    """As frozen ones of quanto, and those of torchao."""
    module = OwnAttention()
    module.q.weight = nn.Parameter(TwoTensor(torch.ones(16, 16), torch.ones(16, 16)))
    words = "q.weight is quantized, and has no true derivatives"
    refused(lambda: lb.capture(module, X), words, error=CheckpointError)
    refused(lambda: lb.compare(module, {"x": X}), words, error=CheckpointError)


def test_probabilities_that_are_not_seen_are_refused():
    config = tf.BloomConfig(vocab_size=60, hidden_size=24, n_layer=2, n_head=4)
    model = build(lambda: tf.BloomModel(config))
    refusal = pytest.raises(CaptureError, match=r"BloomModel ran, .*output_attentions=True")
    with refusal, lb.attention_probabilities(model):
        model(TOKENS)
    model.set_attn_implementation("eager")  # what the sentence says to do
    model.requires_grad_().zero_grad()
    JaSMin()(model(TOKENS, output_attentions=True).attentions).backward()
    assert bool((model.h[0].self_attention.query_key_value.weight.grad != 0).any())


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_positions_of_several_axes_go_with_their_samples(samples):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    config = tf.Qwen2VLTextConfig(**LLAMA, rope_parameters=rope, pad_token_id=0)
    model = build(lambda: tf.AutoModel.from_config(config))
    positions = torch.arange(7).repeat(3, samples, 1)
    positions[:, 1:2] += 3
    positions[1, 2:3] *= 2
    batch = {"input_ids": TOKENS[:samples], "position_ids": positions}
    ds = lb.compare(model, batch, bounds=[], tol=1e-6, progress=False)
    for sample in range(samples):
        one = {"input_ids": TOKENS[[sample]], "position_ids": positions[:, [sample]]}
        alone = [lb.spectral_norm(att, tol=1e-6).lower[0] for att in lb.capture(model, one)]
        mine = torch.tensor(ds.exact[sample].values)
        torch.testing.assert_close(mine, torch.stack(alone).to(mine), rtol=1e-5, atol=0)
