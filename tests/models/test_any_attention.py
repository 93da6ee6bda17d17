"""Attention of any make against dense derivatives of the model's own modules: seen through
transformers' interface, torch's function or by hand, in closed form or through the module."""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from support.models import GATED, IDS, IMAGE, LATENT, NARROW, TEXT, build
from support.versions import marked, newer_transformers
from torch import Tensor, nn

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.attention.module_attention import ModuleAttention

IDS_9 = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
IDS_7 = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(2))
IDS_8 = IDS_9[:, :8]
X, Y = (torch.randn(2, n, 24, generator=torch.Generator().manual_seed(n)) for n in (6, 5))
ONES = torch.ones_like(IDS_9)
PADDED = ONES.index_put((torch.tensor([1, 1]), torch.tensor([7, 8])), torch.tensor(0))
BOTH = {"input_ids": IDS_9, "decoder_input_ids": IDS_7}
SMALL = {"vocab_size": 60, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4}
BART = {
    **{"vocab_size": 60, "d_model": 24, "max_position_embeddings": 32},
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
       (("layers", 1), ("attention_heads", 4), ("ffn_dim", 32))},
}  # fmt: skip
BLOOM = {"vocab_size": 60, "hidden_size": 24, "n_layer": 1, "n_head": 4}
FALCON = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
GPTJ = {"vocab_size": 60, "n_embd": 24, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
ESM = {
    **{**TEXT, "num_hidden_layers": 1, "position_embedding_type": "rotary"},
    **{"mask_token_id": 2, "pad_token_id": 1, "token_dropout": False},
}
MOSHI = {**NARROW, "head_dim": 6, "ffn_dim": 32, "sliding_window": 40}
MOSHI.pop("intermediate_size")
XLM = {"vocab_size": 60, "emb_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
LONGFORMER = {**TEXT, "num_hidden_layers": 1, "attention_window": [4]}
SPARSE = {**LATENT, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
XLNET = {"vocab_size": 60, "d_model": 24, "n_layer": 1, "n_head": 4, "d_inner": 32}
DEBERTA = {**TEXT, "num_hidden_layers": 1, "relative_attention": True, "pos_att_type": "p2c|c2p"}
CONFORMER = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"intermediate_size": 32, "feature_projection_input_dim": 24},
    "conv_depthwise_kernel_size": 3,
}


class NanoBlock(nn.Module):
    """Causal self-attention as small scripts write it."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.fused = nn.Linear(24, 72), nn.Linear(24, 24), fused

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 4, 6).transpose(1, 2) for t in self.c_attn(x).split(d, 2))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * 6**-0.5
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))


class Ellipses(nn.Module):
    """Heads without an axis of samples in the equation, and keys that heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 6))
        k, v = self.kv(x).chunk(2, -1)
        p = torch.einsum("...ihd,...jd->...hij", q, k).softmax(-1)
        return self.out(torch.einsum("...hij,...jd->...ihd", p, v).flatten(-2))


class Everything(nn.Module):
    """Latent queries, keys (in part) and values, and a gate, in the precision of the input."""

    def __init__(self, per_head: bool = False) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(24, 10), nn.LayerNorm(10), nn.Linear(10, 24)
        self.kv_a, self.kv_norm = nn.Linear(24, 9), nn.RMSNorm(7)
        self.kv_b, self.out = nn.Linear(7, 4 * (4 + 5)), nn.Linear(20, 24)
        self.gate = nn.Linear(24, 4 if per_head else 20)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (4, 6)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([7, 2], -1)
        made = self.kv_b(self.kv_norm(latent)).unflatten(-1, (4, 9)).transpose(1, 2)
        k, v = made.split([4, 5], -1)
        k = torch.cat([k, shared[:, None].expand(-1, 4, -1, -1)], -1)
        o = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        gate = self.gate(x).sigmoid().unflatten(-1, (4, -1))
        return self.out((o * gate).flatten(2))


class NormalisedValues(nn.Module):
    """Values normalised head by head, of keys that heads share, as Gemma 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.k_norm, self.v_norm = nn.RMSNorm(6), nn.RMSNorm(6, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 6)).transpose(1, 2).chunk(2, 1)
        k, v = (t.repeat_interleave(2, 1) for t in (self.k_norm(k), self.v_norm(v)))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class AddedPositions(nn.Module):
    """Positions added to what queries and keys are made of, as DETR has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.out = nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, position_embeddings: Tensor) -> Tensor:
        both = self.qk(x + position_embeddings).unflatten(-1, (8, 6)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (4, 6)).transpose(1, 2)
        o = nn.functional.scaled_dot_product_attention(*both.chunk(2, 1), v)
        return self.out(o.transpose(1, 2).flatten(2))


class Crossing(nn.Module):
    """Cross-attention of streams of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(10, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = self.kv(encoder_hidden_states).unflatten(-1, (8, 6)).transpose(1, 2).chunk(2, 1)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).flatten(2))


class CrossingPositions(nn.Module):
    """The same with positions added to what queries and keys are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(10, 24), nn.Linear(10, 24)
        self.out = nn.Linear(24, 24)

    def forward(
        self, x: Tensor, encoder_hidden_states: Tensor, query_pos: Tensor, encoder_pos: Tensor
    ) -> Tensor:
        made = self.q(x + query_pos), self.k(encoder_hidden_states + encoder_pos)
        q, k, v = (
            t.unflatten(-1, (4, 6)).transpose(1, 2) for t in (*made, self.v(encoder_hidden_states))
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).flatten(2))


class RelativePositions(nn.Module):
    """Transformer-XL's scores by hand, with vectors of each distance for queries and keys.

    ``fused``: they are handed on as a mask. ``both``: products of keys with positions as well.
    """

    def __init__(self, fused: bool, both: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(24, 72), nn.Linear(24, 24), fused
        self.u, self.of_q, self.of_k = (
            nn.Parameter(torch.randn(4, n, 6, generator=torch.Generator().manual_seed(n)))
            for n in (1, 11, 13)
        )
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 6)).transpose(1, 2).chunk(3, 1)
        i = torch.arange(x.shape[1])
        far = i[:, None] - i + 5
        added = torch.einsum("bhid,hijd->bhij", q + self.u, self.of_q[:, far])
        if self.both:
            added = added + torch.einsum("bhjd,hijd->bhij", k, self.of_k[:, far])
        if self.fused:
            o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added * 6**-0.5)
        else:
            scores = (q @ k.mT + added) * 6**-0.5
            o = scores.masked_fill(far < 3, -torch.inf).softmax(-1) @ v
        return self.out(o.transpose(1, 2).flatten(2))


EXACT: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], set[str]]] = {
    "everything": (Everything, {"x": X}, {"qk_norm", "value_norm", "gate"}),
    "a gate a head": (lambda: Everything(True), {"x": X}, {"qk_norm", "value_norm", "gate"}),
    "normalised values": (NormalisedValues, {"x": X}, {"qk_norm", "value_norm"}),
    "cross": (Crossing, {"x": X, "encoder_hidden_states": Y[..., :10].contiguous()}, {"cross"}),
}
PLACES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], str]] = {
    "added positions": (
        *(AddedPositions, {"x": X, "position_embeddings": X[1:].expand(2, -1, -1).contiguous()}),
        "of the same token at other positions",
    ),
    "cross with positions": (
        CrossingPositions,
        {
            **{"x": X, "encoder_hidden_states": Y[..., :10].contiguous()},
            **{
                "query_pos": X[1:].expand(2, -1, -1),
                "encoder_pos": Y[:1, :, 10:20].expand(2, -1, -1),
            },
        },
        "of the same token at other positions",
    ),
    **{
        f"relative positions, {fused}, {both}": (
            *(partial(RelativePositions, fused, both), {"x": X}),
            "adds other products of its tokens to its scores",
        )
        for fused, both in itertools.product((False, True), repeat=2)
    },
}
"""Modules whose positions act on queries, keys or scores otherwise than by a rotation or a mask."""
Case = tuple[Callable[[], nn.Module], dict[str, Tensor], str, str]
LACKING = {
    "T5": "the softmax of its module is in float32",
    "blocks of tokens": "the softmax of its module is in float32",
    "chosen keys": "there is no DeepSeek V3.2",
    "gated": "Qwen3-Next must have linear attention",
}
"""What older versions of transformers lack."""
CASES: dict[str, Case] = {
    "T5": (lambda: tf.T5Model(tf.T5Config(**SMALL)), BOTH, "o", "both"),
    "BART": (lambda: tf.BartModel(tf.BartConfig(**BART)), BOTH, "out_proj", "both"),
    "BLOOM": (lambda: tf.BloomModel(tf.BloomConfig(**BLOOM)), {"input_ids": IDS_9}, "dense", "c"),
    "Falcon": (
        *(lambda: tf.FalconModel(tf.FalconConfig(**FALCON, alibi=True)), {"input_ids": IDS_9}),
        *("dense", "closed form"),
    ),
    "GPT-J": (
        *(lambda: tf.GPTJModel(tf.GPTJConfig(**GPTJ)), {"input_ids": IDS_9}),
        *("out_proj", "closed form"),
    ),
    "Moshi": (
        *(lambda: tf.MoshiModel(tf.MoshiConfig(**MOSHI)), {"input_ids": IDS_9}),
        *("o_proj.linear", "closed form"),
    ),
    "ESM": (
        *(lambda: tf.EsmModel(tf.EsmConfig(**ESM)), {"input_ids": IDS_9}),
        *("", "closed form"),
    ),
    "XLM": (lambda: tf.XLMModel(tf.XLMConfig(**XLM)), {"input_ids": IDS_9}, "out_lin", "either"),
    "chunks of keys": (
        *(lambda: tf.LongformerModel(tf.LongformerConfig(**LONGFORMER)), {"input_ids": IDS_8}),
        *("", "automatic"),
    ),
    "blocks of tokens": (
        *(lambda: tf.LongT5EncoderModel(tf.LongT5Config(**SMALL, local_radius=3)),),
        *({"input_ids": IDS_9}, "o", "automatic"),
    ),
    "chosen keys": (
        *(lambda: tf.DeepseekV32Model(tf.DeepseekV32Config(**SPARSE)), {"input_ids": IDS_9}),
        *("o_proj", "automatic"),
    ),
    "DeBERTa": (
        *(lambda: tf.DebertaV2Model(tf.DebertaV2Config(**DEBERTA)), {"input_ids": IDS_9}),
        *("", "automatic"),
    ),
    "Wav2Vec2-BERT": (
        *(lambda: tf.Wav2Vec2BertModel(tf.Wav2Vec2BertConfig(**CONFORMER)), {"input_features": X}),
        *("linear_out", "automatic"),
    ),
    "latent": (
        *(lambda: tf.DeepseekV3Model(tf.DeepseekV3Config(**LATENT)), {"input_ids": IDS_9}),
        *("o_proj", "closed form"),
    ),
    "gated": (
        *(lambda: tf.Qwen3NextModel(tf.Qwen3NextConfig(**GATED)), {"input_ids": IDS_9}),
        *("o_proj", "closed form"),
    ),
    "sub-norms": (
        *(lambda: tf.BitNetModel(tf.BitNetConfig(**LLAMA_1, **IDS)), {"input_ids": IDS_9}),
        *("o_proj", "automatic"),
    ),
    "nanoGPT by hand": (lambda: NanoBlock(False), {"x": X}, "c_proj", "closed form"),
    "nanoGPT fused": (lambda: NanoBlock(True), {"x": X}, "c_proj", "closed form"),
    "ellipses": (Ellipses, {"x": X}, "out", "either"),
}
LLAMA_1 = {
    **{"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40},
}


def given_to(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments that a module is given in a plain pass, by name."""
    module, found = model.get_submodule(name), []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    arguments = dict(found[0])
    return arguments | arguments.pop("kwargs", {})


def dense_norms(
    model: nn.Module, name: str, inputs: dict[str, Tensor], projection: str, stream: str, heads: int
) -> Tensor:
    """Largest singular values of the Jacobians of heads at the first sample, by autograd.

    Padding is neither moved nor counted.
    """
    given, module = given_to(model, name, inputs), model.get_submodule(name)
    tensors = [key for key, t in given.items() if isinstance(t, Tensor) and t.ndim == 3]
    memory = next((k for k in tensors if k in ("key_value_states", "encoder_hidden_states")), "")
    of = memory if stream == "memory" else tensors[0]
    x = given[of].detach().clone().requires_grad_()
    seen: list[Tensor] = []
    if projection:
        hook = module.get_submodule(projection).register_forward_pre_hook(
            lambda module, args: seen.append(args[0])
        )
    for cache in {"past_key_values", "layer_past", "cache"} & given.keys():
        given[cache] = None
    out = module(**{key: x if t is given[of] else t for key, t in given.items()})
    if projection:
        hook.remove()
    flat = seen[0] if projection else out[0]
    y = flat[0].reshape(flat.shape[-2], heads, -1)
    rows = [torch.autograd.grad(v, x, retain_graph=True)[0][0].flatten() for v in y.flatten()]
    jacobian = torch.stack(rows).view(*y.shape, -1)
    return torch.stack(
        [torch.linalg.matrix_norm(jacobian[:, h].flatten(0, 1), 2) for h in range(heads)]
    )


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_padding_belongs_to_its_stream(side: str) -> None:
    """Sample 1 has the norms that it has without its padding, though both streams are as long."""
    model = build(lambda: tf.T5Model(tf.T5Config(**SMALL))).double()
    masks = {"attention_mask": ONES, "decoder_attention_mask": ONES}
    masks["attention_mask" if side == "encoder" else "decoder_attention_mask"] = PADDED
    batch = {"input_ids": IDS_9, "decoder_input_ids": IDS_9.flip(1), **masks}
    cut = {"input_ids", "attention_mask"} if side == "encoder" else set(batch) - {"input_ids"}
    cut -= {"attention_mask"} if side == "decoder" else set()
    alone = {k: t[1:, :7] if k in cut else t[1:] for k, t in batch.items()}
    for att, short in zip(lb.capture(model, batch), lb.capture(model, alone), strict=True):
        mine = lb.spectral_norm(att, tol=1e-9).lower[1]
        torch.testing.assert_close(
            mine, lb.spectral_norm(short, tol=1e-9).lower[0], rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("case", EXACT)
def test_closed_forms_to_eight_digits(case: str) -> None:
    """Of modules that do not cast to float32 on the way, enclosures and bounds included."""
    make, inputs, variants = EXACT[case]
    model = build(make).double()
    inputs = {name: t.double() for name, t in inputs.items()}
    for layer in lb.models.capture.capture.Capturer(model).run(inputs):
        att = layer.attention
        assert isinstance(att, Attention)
        assert att.variants == variants
        expected = dense_norms(model, "", inputs, "out", att.perturbed, 4)
        jacobians = lb.HeadJacobian(att).dense()[:4]
        mine = torch.linalg.matrix_norm(jacobians, 2)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=0)
        norm = lb.spectral_norm(att, tol=1e-10, delta=1e-6)
        torch.testing.assert_close(norm.lower[0], expected, rtol=1e-6, atol=0)  # less rounding
        assert bool((norm.upper[0] >= expected * (1 - 1e-10)).all())
        for name in ("lipbound", "lipbound_block"):
            assert bool((lb.bounds.get(name)(att)[0] >= expected * (1 - 1e-9)).all())
        single = build(make)
        narrow = {name: t.float() for name, t in inputs.items()}
        found = lb.capture(single, narrow, layers=[layer.index])[0]
        torch.testing.assert_close(
            lb.spectral_norm(found, tol=1e-7).lower[0], expected, rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("case", PLACES)
def test_positions_that_have_no_closed_form_to_eight_digits(case: str) -> None:
    """They are measured by automatic differentiation, in float32 as well, and why is told."""
    make, inputs, why = PLACES[case]
    model, single = build(make).double(), build(make)
    wide = {name: t.double() for name, t in inputs.items()}
    for layer in lb.models.capture.capture.Capturer(model).run(wide):
        att = layer.attention
        assert isinstance(att, ModuleAttention)
        assert why in att.reason
        expected = dense_norms(model, "", wide, "out", att.perturbed, 4)
        norm = lb.spectral_norm(att, tol=1e-9, delta=1e-6)
        torch.testing.assert_close(norm.lower[0], expected, rtol=1e-8, atol=0)
        assert bool((norm.upper[0] >= expected).all())
        narrow = {name: t.float() for name, t in inputs.items()}
        found = lb.capture(single, narrow, layers=[layer.index])[0]
        torch.testing.assert_close(
            lb.spectral_norm(found, tol=1e-7).lower[0], expected, rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("case", marked(CASES, LACKING))
def test_norms_are_those_of_the_models_own_module(case: str) -> None:
    make, inputs, projection, measured = CASES[case]
    model = build(make).double()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    found = lb.models.capture.capture.Capturer(model).run(inputs)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    for layer in found:
        att = layer.attention
        expected = dense_norms(model, layer.name, inputs, projection, att.perturbed, att.heads)
        norm = lb.spectral_norm(att, tol=1e-9, delta=1e-6)
        torch.testing.assert_close(norm.lower[0], expected, rtol=2e-6, atol=0)
        assert bool((norm.upper[0] >= expected * (1 - 2e-6)).all())
        assert measured in ("both", "either") or isinstance(att, Attention) == (measured[0] == "c")
    if measured == "both":
        streams = [layer.attention.perturbed for layer in found]
        assert streams == ["input", "input", "queries", "memory"]


def test_heads_that_hardly_move_are_measured_like_others() -> None:
    """Where every probability is all but one or zero, much of a derivative by queries is rounding,
    and automatic differentiation is not refused for that."""
    model = build(Crossing).double()
    with torch.no_grad():
        model.q.weight[:6] *= 40
    inputs = {"x": X.double(), "encoder_hidden_states": Y[..., :10].double()}
    (automatic, _), (closed, _) = (lb.capture(model, inputs, closed=one) for one in (False, True))
    found = lb.spectral_norm(automatic, tol=1e-6).lower
    expected = torch.linalg.matrix_norm(lb.HeadJacobian(closed).dense(), 2).view(2, 4)
    assert bool((expected[:, 0] < 1e-9).all())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-13)


def test_tokens_that_stand_before_samples() -> None:
    """torch's layers are given (N, samples, D) by default; XLNet hands its own that."""
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32), 1).eval().double()
    x = torch.randn(7, 2, 24, dtype=torch.float64)
    (att,) = lb.capture(module, x)
    assert isinstance(att, Attention)
    torch.testing.assert_close(att.x, x.transpose(0, 1))
    own = module.layers[0].self_attn
    w = own.in_proj_weight.detach().view(3, 4, 6, 24).mT
    b_q, b_k, b_v = own.in_proj_bias.detach().view(3, 4, 6)
    made = lb.Attention(x.transpose(0, 1), *w, b_q=b_q, b_k=b_k, b_v=b_v)
    torch.testing.assert_close(
        lb.spectral_norm(att, tol=1e-9).lower, lb.spectral_norm(made, tol=1e-9).lower
    )
    model = build(lambda: tf.XLNetModel(tf.XLNetConfig(**XLNET))).double()
    mask = torch.ones(2, 9).index_fill(1, torch.arange(3), 0.0)
    batch = {"input_ids": IDS_9, "attention_mask": mask}
    (att,) = lb.capture(model, batch)
    assert isinstance(att, ModuleAttention)
    assert "adds other products of its tokens" in att.reason
    own, given = model.layer[0].rel_attn, given_to(model, "layer.0.rel_attn", batch)
    core, seen = own.rel_attn_core, list[Tensor]()
    own.rel_attn_core = lambda *args, **kwargs: seen.append(core(*args, **kwargs)) or seen[-1]
    h = given["h"].detach().requires_grad_()
    own(**{**given, "h": h})  # (N, samples, D) to (N, samples, heads, d_v)
    # masked tokens attend to themselves, and so are no padding
    rows = [torch.autograd.grad(o, h, retain_graph=True)[0] for o in seen[0][:, 1].flatten()]
    jacobian = torch.stack(rows)[:, :, 1].unflatten(0, (9, 4, 6)).flatten(3)
    expected = torch.linalg.matrix_norm(jacobian.transpose(0, 1).flatten(1, 2), 2)
    torch.testing.assert_close(
        lb.spectral_norm(att, tol=1e-9).lower[1], expected, rtol=1e-7, atol=0
    )


class Anchors(nn.Module):
    """Tokens that attend to themselves and to others."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, encoder_hidden_states: Tensor, x: Tensor) -> Tensor:
        every = torch.cat([x, encoder_hidden_states], 1)
        q = self.q(x).unflatten(-1, (4, 6)).transpose(1, 2)
        k, v = self.kv(every).unflatten(-1, (8, 6)).transpose(1, 2).chunk(2, 1)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).flatten(2))


def test_queries_that_are_keys_as_well_have_no_closed_form() -> None:
    """One of their streams moves queries and keys, and cross-attention in closed form holds one."""
    model = build(Anchors).double()
    found = lb.capture(model, {"encoder_hidden_states": Y.double(), "x": X.double()})
    assert [layer.perturbed for layer in found] == ["queries", "memory"]
    x, y = X.double()[:1].requires_grad_(), Y.double()[:1]
    seen: list[Tensor] = []
    model.out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(y, x)
    rows = [torch.autograd.grad(o, x, retain_graph=True)[0].flatten() for o in seen[0].flatten()]
    jacobian = torch.stack(rows).view(6, 4, 6, -1)
    expected = [torch.linalg.matrix_norm(jacobian[:, h].flatten(0, 1), 2) for h in range(4)]
    assert isinstance(found[0], ModuleAttention)
    mine = lb.spectral_norm(found[0], tol=1e-9).lower[0]
    torch.testing.assert_close(mine, torch.stack(expected), rtol=1e-6, atol=0)


class Joint(nn.Module):
    """Tokens of two kinds in one softmax, as in diffusion transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_y, self.out = nn.Linear(24, 72), nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        parts = torch.cat([self.of_x(x), self.of_y(y)], 1).unflatten(-1, (12, 6)).transpose(1, 2)
        q, k, v = parts.chunk(3, 1)
        o = nn.functional.scaled_dot_product_attention(query=q, key=k, value=v)
        return self.out(o.transpose(1, 2).flatten(2))


def test_streams_of_one_softmax_move_together() -> None:
    module = build(Joint).double()
    x, y = X.double(), Y.double()
    (att,) = lb.capture(module, {"x": x, "y": y})
    assert (att.tokens, att.samples) == (11, 2)
    both = torch.cat([x[:1], y[:1]], 1).requires_grad_()
    seen: list[Tensor] = []
    module.out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    module(both[:, :6], both[:, 6:])
    rows = [torch.autograd.grad(o, both, retain_graph=True)[0].flatten() for o in seen[0].flatten()]
    jacobian = torch.stack(rows).view(11, 4, 6, -1)
    expected = [torch.linalg.matrix_norm(jacobian[:, h].flatten(0, 1), 2) for h in range(4)]
    mine = lb.spectral_norm(att, tol=1e-9).lower[0]
    torch.testing.assert_close(mine, torch.stack(expected), rtol=1e-6, atol=0)


class Talking(nn.Module):
    """Heads whose scores and probabilities are mixed by weights (talking heads)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 6)).transpose(1, 2).chunk(3, 1)
        scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        p = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((p @ v).transpose(1, 2).flatten(2))


def test_talking_heads() -> None:
    module = build(Talking).double()
    (layer,) = lb.models.capture.capture.Capturer(module).run({"x": X.double()})
    assert isinstance(layer.attention, ModuleAttention)
    expected = dense_norms(module, "", {"x": X.double()}, "out", "input", 4)
    mine = lb.spectral_norm(layer.attention, tol=1e-9).lower[0]
    torch.testing.assert_close(mine, expected, rtol=1e-8, atol=0)


@newer_transformers("the projections of Swin have other names")
@pytest.mark.parametrize("kind", ["closed", "automatic"])
def test_windows_of_pictures(kind: str) -> None:
    """Windows stand where samples do; their norms are those of the module, window by window."""
    config = tf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=12, depths=[2], num_heads=[2], window_size=4
    )
    model = build(lambda: tf.SwinModel(config)).double()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    inputs = {"pixel_values": pixels}
    run = lb.models.capture.capture.Capturer(model, closed=kind == "closed").run(inputs)
    model.set_attn_implementation("eager")
    for layer in run:
        att = layer.attention
        assert isinstance(att, Attention) == (kind == "closed")
        assert (layer.windows, att.samples, att.tokens) == (4, 8, 16)
        expected = dense_norms(model, layer.name, inputs, "o_proj", "input", 2)
        mine = lb.spectral_norm(att, tol=1e-9).lower[0]
        torch.testing.assert_close(mine, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("case", ["nanoGPT by hand", "GPT-J", "BLOOM"])
def test_a_closed_form_is_what_its_module_computes(case: str) -> None:
    """`closed=False` measures the same norms without anything that was read off the model."""
    make, inputs, _, _ = CASES[case]
    model = build(make).double()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    some, others = lb.capture(model, inputs), lb.capture(model, inputs, closed=False)
    for a, b in zip(some, others, strict=True):
        assert (type(a), type(b)) == (Attention, ModuleAttention)
        mine, its = (lb.spectral_norm(t, tol=1e-9).lower for t in (a, b))
        torch.testing.assert_close(mine, its, rtol=1e-7, atol=0)


def test_random_numbers_are_the_same_in_every_pass() -> None:
    """A model that draws which patches it sees is measured at the draw of seed 0, and says so."""
    model = build(lambda: tf.ViTMAEModel(tf.ViTMAEConfig(**IMAGE)))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    with pytest.warns(lb.Notice, match=r"draws random numbers: .* torch.manual_seed\(0\)"):
        first = lb.capture(model, {"pixel_values": pixels})
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    second = lb.capture(model, {"pixel_values": pixels})
    torch.manual_seed(0)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        own = model(pixels, output_attentions=True).attentions
    for a, b, p in zip(first, second, own, strict=True):
        assert torch.equal(a.x, b.x)
        torch.testing.assert_close(a.p, p, rtol=1e-4, atol=1e-6)


def test_an_empty_cache_stays_empty() -> None:
    """A cache that the pass fills is empty again when a module of it is run by itself."""
    model = build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA_1, **IDS)))

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids, use_cache=True).last_hidden_state

    (plain,) = lb.capture(model, {"input_ids": IDS_9})
    (layer,) = lb.models.capture.capture.Capturer(Caching(), closed=False).run({"input_ids": IDS_9})
    assert layer.name.endswith("self_attn")
    mine, its = (lb.spectral_norm(t, tol=1e-6).lower for t in (plain, layer.attention))
    torch.testing.assert_close(mine.double(), its, rtol=1e-4, atol=0)


class Packed(nn.Module):
    """Tokens of one sample without an axis of samples, or of pictures with two for the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x) if x.ndim > 2 else 1
        qkv = self.qkv(x).view(samples, -1, 12, 6).transpose(1, 2).chunk(3, 1)
        o = nn.functional.scaled_dot_product_attention(*qkv)
        return self.out(o.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("shape", [(6, 24), (2, 2, 3, 24)])
def test_tokens_of_any_layout_have_a_closed_form(shape: tuple[int, ...]) -> None:
    module = build(Packed).double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ((some,), (others,)) = (lb.capture(module, {"x": x}, closed=c) for c in (True, False))
    assert (type(some), some.tokens) == (Attention, 6)
    assert isinstance(others, ModuleAttention)
    mine, its = (lb.spectral_norm(t, tol=1e-9).lower for t in (some, others))
    torch.testing.assert_close(mine, its, rtol=1e-6, atol=0)
    alone = x[:1] if len(shape) > 2 else x
    seen: list[Tensor] = []
    module.out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    module(alone.requires_grad_())
    rows = [
        torch.autograd.grad(o, alone, retain_graph=True)[0].flatten() for o in seen[0].flatten()
    ]
    jacobian = torch.stack(rows).view(6, 4, 6, -1)
    expected = [torch.linalg.matrix_norm(jacobian[:, h].flatten(0, 1), 2) for h in range(4)]
    torch.testing.assert_close(mine[0], torch.stack(expected), rtol=1e-8, atol=0)


class Copies(nn.Module):
    """Attention that is given its tokens three times over, as copies, beside a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(0.3 * torch.randn(24, 24)) for _ in range(3))
        self.out = nn.Linear(24, 24)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sides = zip((q, k, v), self.w, strict=True)
        q, k, v = ((x @ w).unflatten(-1, (4, 6)).transpose(1, 2) for x, w in sides)
        return self.out(((q @ k.mT + self.mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Around(nn.Module):
    """Makes those copies; takes a device by position only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(24), Copies()

    def to(self, device_or_dtype: Any) -> "Around":
        return super().to(device_or_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x), self.norm(x), self.norm(x))


@pytest.mark.parametrize("closed", [True, False])
def test_copies_of_tokens_are_one_stream(closed: bool) -> None:
    module, seen = build(Around).double(), []
    (layer,) = lb.models.capture.capture.Capturer(module, closed=closed).run({"x": X.double()})
    assert (layer.name, isinstance(layer.attention, Attention)) == ("inner", closed)
    module.inner.out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = module.norm(X.double()).detach()[:1].requires_grad_()
    module.inner(x, x, x)
    rows = [torch.autograd.grad(o, x, retain_graph=True)[0].flatten() for o in seen[0].flatten()]
    jacobian = torch.stack(rows).view(6, 4, 6, -1)
    expected = [torch.linalg.matrix_norm(jacobian[:, h].flatten(0, 1), 2) for h in range(4)]
    mine = lb.spectral_norm(layer.attention, tol=1e-9).lower[0]
    torch.testing.assert_close(mine, torch.stack(expected), rtol=1e-6, atol=0)
    if closed:
        ds = lb.compare(module, X, bounds="none", dtype="float64", progress=False)
        torch.testing.assert_close(
            torch.from_numpy(ds["exact"].values[0, 0]), mine, rtol=1e-3, atol=0
        )
