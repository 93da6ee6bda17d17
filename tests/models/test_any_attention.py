"""Attention of any make against dense derivatives of the model's own modules: seen through
transformers' interface, torch's function or by hand, in closed form or through the module."""

import itertools
from functools import partial

import pytest
import torch
import transformers as tf
from support import models
from support.models import BART, GATED, IDS, IMAGE, LATENT, LLAMA, NARROW, T5, TEXT, build, wide
from support.modules import QKV, Maps, before, given_to, joined, maps, norms, own_norms, sdpa, split
from support.modules import check as checked
from support.versions import marked, newer_transformers
from torch import Tensor, nn

import lipbound as lb
from lipbound.attention.layer import Attention
from lipbound.models.capture.capture import Capturer

check = partial(checked, rtol=1e-6)
IDS_9 = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
IDS_7 = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(2))
WORDS = {"input_ids": IDS_9}
X, Y = (torch.randn(2, n, 24, generator=torch.Generator().manual_seed(n)) for n in (6, 5))
BOTH = {"x": X, "encoder_hidden_states": Y[..., :10].contiguous()}
BLOOM = {"vocab_size": 60, "hidden_size": 24, "n_layer": 1, "n_head": 4}
FALCON = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
GPTJ = {"vocab_size": 60, "n_embd": 24, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
ESM = {**TEXT, "num_hidden_layers": 1, "position_embedding_type": "rotary"}
ESM |= {"mask_token_id": 2, "pad_token_id": 1, "token_dropout": False}
MOSHI = {**NARROW, "head_dim": 6, "ffn_dim": 32, "sliding_window": 40}
MOSHI.pop("intermediate_size")
XLM = {"vocab_size": 60, "emb_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
LONGFORMER = {**TEXT, "num_hidden_layers": 1, "attention_window": [4]}
GROUPED = {**TEXT, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "q_lora_rank": 12}
GROUPED |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
GROUPED |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
GROUPED |= {"o_groups": 2, "o_lora_rank": 8, "hc_mult": 2}
SPARSE = {**LATENT, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
XLNET = {"vocab_size": 60, "d_model": 24, "n_layer": 1, "n_head": 4, "d_inner": 32}
DEBERTA = {**TEXT, "num_hidden_layers": 1, "relative_attention": True, "pos_att_type": "p2c|c2p"}
CONFORMER = {**TEXT, "num_hidden_layers": 1, "feature_projection_input_dim": 24}
CONFORMER["conv_depthwise_kernel_size"] = 3
LLAMA_1 = {**LLAMA, **IDS, "num_hidden_layers": 1}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2], "num_heads": [2]}


@maps(qkv=(24, 72))
def by_hand(self, x):
    """Causal self-attention as small scripts write it."""
    b, n, d = x.shape
    q, k, v = (t.view(b, n, 4, 6).transpose(1, 2) for t in self.qkv(x).split(d, 2))
    scores = (q @ k.transpose(-2, -1)) * 6**-0.5
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return self.out(y.transpose(1, 2).contiguous().view(b, n, d))


@maps(qkv=(24, 72))
def by_torch(self, x):
    q, k, v = (split(t) for t in self.qkv(x).split(x.shape[-1], 2))
    return self.out(joined(sdpa(q, k, v, is_causal=True)))


@maps(q=(24, 24), kv=(24, 12))
def ellipses(self, x):
    """Heads without an axis of samples in the equation, and keys that heads share."""
    q = self.q(x).unflatten(-1, (4, 6))
    k, v = self.kv(x).chunk(2, -1)
    p = torch.einsum("...ihd,...jd->...hij", q, k).softmax(-1)
    return self.out(torch.einsum("...hij,...jd->...ihd", p, v).flatten(-2))


class HandedOn(QKV):
    """Heads that a module without weights is given, as in x-transformers."""

    def __init__(self):
        super().__init__(24, 4)
        self.attend = type("Attend", (nn.Module,), {"forward": lambda _, *heads: sdpa(*heads)})()

    def forward(self, x):
        return self.o(joined(self.attend(*self.qkv(x))))


class Everything(Maps):
    """Latent queries, keys (in part) and values, and a gate, in the precision of the input."""

    def __init__(self, per_head=False):
        gate = 24, 4 if per_head else 20
        super().__init__(20, q_a=(24, 10), q_b=(10, 24), kv_a=(24, 9), kv_b=(7, 36), gate=gate)
        self.q_norm, self.kv_norm = nn.LayerNorm(10), nn.RMSNorm(7)

    def forward(self, x):
        q = split(self.q_b(self.q_norm(self.q_a(x))))
        latent, shared = self.kv_a(x).split([7, 2], -1)
        k, v = split(self.kv_b(self.kv_norm(latent))).split([4, 5], -1)
        k = torch.cat([k, shared[:, None].expand(-1, 4, -1, -1)], -1)
        gate = self.gate(x).sigmoid().unflatten(-1, (4, -1))
        return self.out((sdpa(q, k, v).transpose(1, 2) * gate).flatten(2))


class NormalisedValues(Maps):
    """Values normalised head by head, of keys that heads share, as Gemma 4 has them."""

    def __init__(self):
        super().__init__(24, q=(24, 24), kv=(24, 24))
        self.k_norm, self.v_norm = nn.RMSNorm(6), nn.RMSNorm(6, elementwise_affine=False)

    def forward(self, x):
        k, v = split(self.kv(x)).chunk(2, 1)
        k, v = (t.repeat_interleave(2, 1) for t in (self.k_norm(k), self.v_norm(v)))
        return self.out(joined(sdpa(split(self.q(x)), k, v, is_causal=True)))


@maps(qk=(24, 48), v=(24, 24))
def added_positions(self, x, position_embeddings):
    """Positions added to what queries and keys are made of, as DETR has them."""
    both = split(self.qk(x + position_embeddings), 8)
    return self.out(joined(sdpa(*both.chunk(2, 1), split(self.v(x)))))


class OwnPositions(Maps):
    """Adds positions of its own to its tokens."""

    def __init__(self):
        super().__init__(24, qkv=(24, 72))
        self.places = nn.Parameter(torch.randn(1, 6, 24))

    def forward(self, x):
        return self.out(joined(sdpa(*split(self.qkv(x + self.places), 12).chunk(3, 1))))


@maps(q=(24, 24), kv=(10, 48))
def crossing(self, x, encoder_hidden_states):
    """Cross-attention of streams of two widths."""
    k, v = split(self.kv(encoder_hidden_states), 8).chunk(2, 1)
    return self.out(joined(sdpa(split(self.q(x)), k, v)))


@maps(q=(24, 24), k=(10, 24), v=(10, 24))
def crossing_positions(self, x, encoder_hidden_states, query_pos, encoder_pos):
    """The same with positions added to what queries and keys are made of."""
    made = self.q(x + query_pos), self.k(encoder_hidden_states + encoder_pos)
    return self.out(joined(sdpa(*map(split, (*made, self.v(encoder_hidden_states))))))


class RelativePositions(Maps):
    """Transformer-XL's scores by hand, with vectors of each distance for queries and keys.

    ``fused``: they are handed on as a mask. ``both``: products of keys with positions as well.
    """

    def __init__(self, fused, both):
        super().__init__(24, qkv=(24, 72))
        self.u, self.of_q, self.of_k = (
            nn.Parameter(torch.randn(4, n, 6, generator=torch.Generator().manual_seed(n)))
            for n in (1, 11, 13)
        )
        self.fused, self.both = fused, both

    def forward(self, x):
        q, k, v = split(self.qkv(x), 12).chunk(3, 1)
        i = torch.arange(x.shape[1])
        far = i[:, None] - i + 5
        added = torch.einsum("bhid,hijd->bhij", q + self.u, self.of_q[:, far])
        if self.both:
            added = added + torch.einsum("bhjd,hijd->bhij", k, self.of_k[:, far])
        if self.fused:
            return self.out(joined(sdpa(q, k, v, attn_mask=added * 6**-0.5)))
        scores = (q @ k.mT + added) * 6**-0.5
        return self.out(joined(scores.masked_fill(far < 3, -torch.inf).softmax(-1) @ v))


@maps(qkv=(24, 72), before=(4, 4), after=(4, 4))
def talking(self, x):
    """Heads whose scores and probabilities are mixed by weights (talking heads)."""
    q, k, v = split(self.qkv(x), 12).chunk(3, 1)
    scores = self.before((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    p = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return self.out(joined(p @ v))


@maps(q=(24, 24), kv=(24, 48))
def anchors(self, encoder_hidden_states, x):
    """Tokens that attend to themselves and to others."""
    k, v = split(self.kv(torch.cat([x, encoder_hidden_states], 1)), 8).chunk(2, 1)
    return self.out(joined(sdpa(split(self.q(x)), k, v)))


@maps(of_x=(24, 72), of_y=(24, 72), apart=(24, 24))
def joint(self, x, y, sizes):
    """Tokens of two kinds in one softmax, as in diffusion transformers, projected in parts."""
    q, k, v = split(torch.cat([self.of_x(x), self.of_y(y)], 1), 12).chunk(3, 1)
    parts = joined(sdpa(query=q, key=k, value=v)).split_with_sizes(sizes, 1)
    return torch.cat([*map(lambda f, t: f(t), (self.out, self.apart), parts)], 1)


@maps(qkv=(24, 72))
def packed(self, x):
    """Tokens of one sample without an axis of samples, or of pictures with two for the tokens."""
    samples = len(x) if x.ndim > 2 else 1
    qkv = self.qkv(x).view(samples, -1, 12, 6).transpose(1, 2).chunk(3, 1)
    return self.out(sdpa(*qkv).transpose(1, 2).reshape(x.shape))


class Copies(Maps):
    """Attention that is given its tokens three times over, as copies, beside a mask of -inf."""

    def __init__(self):
        super().__init__(24)
        self.w = nn.ParameterList(nn.Parameter(0.3 * torch.randn(24, 24)) for _ in range(3))
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, q, k, v):
        q, k, v = (split(x @ w) for x, w in zip((q, k, v), self.w, strict=True))
        return self.out(joined((q @ k.mT + self.mask).softmax(-1) @ v))


class Around(nn.Module):
    """Makes those copies; takes a device by position only."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(24), Copies()

    def to(self, device_or_dtype):
        return super().to(device_or_dtype)

    def forward(self, x):
        return x + self.inner(self.norm(x), self.norm(x), self.norm(x))


PLACES = {"query_pos": X[1:].expand(2, -1, -1)}
PLACES |= {"encoder_pos": Y[:1, :, 10:20].expand(2, -1, -1)}
ADDED = {"x": X, "position_embeddings": X[1:].expand(2, -1, -1).contiguous()}
OTHER_POSITIONS = "or differently at each position"
PRODUCTS = "adds other products of its tokens to its scores"
EXACT = {
    "everything": (Everything, {"x": X}, {"qk_norm", "value_norm", "gate"}),
    "a gate a head": (lambda: Everything(True), {"x": X}, {"qk_norm", "value_norm", "gate"}),
    "normalised values": (NormalisedValues, {"x": X}, {"qk_norm", "value_norm"}),
    "cross": (crossing, BOTH, {"cross"}),
    "added positions": (added_positions, ADDED, OTHER_POSITIONS),
    "positions of its own": (OwnPositions, {"x": X}, OTHER_POSITIONS),
    "cross with positions": (crossing_positions, BOTH | PLACES, OTHER_POSITIONS),
}
"""Modules and inputs, and what is done to queries, keys and values, or why there is no closed form:
positions that act on queries, keys or scores otherwise than by a rotation or a mask."""
for fused, both in itertools.product((False, True), repeat=2):
    relative = partial(RelativePositions, fused, both)
    EXACT[f"relative positions, {fused}, {both}"] = relative, {"x": X}, PRODUCTS
LACKING = {
    "T5": "the softmax of its module is in float32",
    "blocks of tokens": "the softmax of its module is in float32",
    "chosen keys": "there is no DeepSeek V3.2",
    "groups of heads": "there is no DeepSeek V4",
    "gated": "Qwen3-Next must have linear attention",
    "differences of heads": "DiffLlama has both in one",
}
"""What older versions of transformers lack."""


def made(name, measured, options, **inputs):
    """A case of a model of transformers."""
    return models.model_of(name, **options), inputs or WORDS, measured


CLOSED, AUTOMATIC = "closed form", "automatic"
CASES = {
    "T5": made("T5", "both", T5, **WORDS, decoder_input_ids=IDS_7),
    "BART": made("Bart", "both", BART, **WORDS, decoder_input_ids=IDS_7),
    "BLOOM": made("Bloom", CLOSED, BLOOM),
    "Falcon": made("Falcon", CLOSED, {**FALCON, "alibi": True}),
    "GPT-J": made("GPTJ", CLOSED, GPTJ),
    "Moshi": made("Moshi", CLOSED, MOSHI),
    "ESM": made("Esm", CLOSED, ESM),
    "XLM": made("XLM", "either", XLM),
    "chunks of keys": made("Longformer", AUTOMATIC, LONGFORMER, input_ids=IDS_9[:, :8]),
    "blocks of tokens": made("LongT5Encoder", AUTOMATIC, {**T5, "local_radius": 3}),
    "chosen keys": made("DeepseekV32", AUTOMATIC, SPARSE),
    "DeBERTa": made("DebertaV2", AUTOMATIC, DEBERTA),
    "Wav2Vec2-BERT": made("Wav2Vec2Bert", AUTOMATIC, CONFORMER, input_features=X),
    "latent": made("DeepseekV3", CLOSED, LATENT),
    "groups of heads": made("DeepseekV4", AUTOMATIC, GROUPED),
    "gated": made("Qwen3Next", CLOSED, GATED),
    "sub-norms": made("BitNet", AUTOMATIC, LLAMA_1),
    "differences of heads": made("DiffLlama", AUTOMATIC, LLAMA_1),
    "nanoGPT by hand": (by_hand, {"x": X}, CLOSED),
    "nanoGPT fused": (by_torch, {"x": X}, CLOSED),
    "heads handed on": (HandedOn, {"x": X}, CLOSED),
    "ellipses": (ellipses, {"x": X}, "either"),
    "talking heads": (talking, {"x": X}, AUTOMATIC),
}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_padding_belongs_to_its_stream(side):
    """Sample 1 has the norms that it has without its padding, though both streams are as long."""
    model = build(lambda: tf.T5Model(tf.T5Config(**T5))).double()
    ones = torch.ones_like(IDS_9)
    padded = ones.index_put((torch.tensor([1, 1]), torch.tensor([7, 8])), torch.tensor(0))
    masks = {"attention_mask": ones, "decoder_attention_mask": ones}
    masks["attention_mask" if side == "encoder" else "decoder_attention_mask"] = padded
    batch = {"input_ids": IDS_9, "decoder_input_ids": IDS_9.flip(1), **masks}
    cut = {"input_ids", "attention_mask"} if side == "encoder" else set(batch) - {"input_ids"}
    cut -= {"attention_mask"} if side == "decoder" else set()
    alone = {k: t[1:, :7] if k in cut else t[1:] for k, t in batch.items()}
    for att, short in zip(lb.capture(model, batch), lb.capture(model, alone), strict=True):
        check(att, lb.spectral_norm(short, tol=1e-9).lower[0], sample=1)


@pytest.mark.parametrize("case", EXACT)
def test_modules_that_keep_their_precision_to_eight_digits(case):
    """In closed form, enclosures and bounds included; or by automatic differentiation, and why is
    told. In float32 as well."""
    make, inputs, what = EXACT[case]
    model, closed = build(make).double(), isinstance(what, set)
    for layer in Capturer(model).run(wide(inputs)):
        att = layer.attention
        assert type(att) is (Attention if closed else lb.ModuleAttention)
        assert att.variants == what if isinstance(what, set) else what in att.reason
        expected = own_norms(model, "", wide(inputs), att)
        # less rounding, in closed form
        check(att, expected, tol=1e-10 if closed else 1e-9, rtol=1e-6 if closed else 1e-8)
        upper = lb.spectral_norm(att, tol=1e-9, delta=1e-6).upper[0]
        assert bool((upper >= expected * (1 - 1e-10)).all())
        if closed:
            mine = torch.linalg.matrix_norm(lb.HeadJacobian(att).dense()[:4], 2)
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=0)
            for name in ("lipbound", "lipbound_block"):
                assert bool((lb.bounds.get(name)(att)[0] >= expected * (1 - 1e-9)).all())
        narrow = lb.capture(build(make), inputs, layers=[layer.index])[0]
        check(narrow, expected, tol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("case", marked(CASES, LACKING))
def test_norms_are_those_of_the_models_own_module(case):
    make, inputs, measured = CASES[case]
    model = build(make).double()
    found = Capturer(model).run(wide(inputs))
    for layer in found:
        att = layer.attention
        assert att.heads == (2 if case == "differences of heads" else 4)
        expected = own_norms(model, layer.name, wide(inputs), att)
        norm = lb.spectral_norm(att, tol=1e-9, delta=1e-6)
        rtol = 1e-8 if case == "talking heads" else 2e-6
        torch.testing.assert_close(norm.lower[0], expected, rtol=rtol, atol=0)
        assert bool((norm.upper[0] >= expected * (1 - rtol)).all())
        assert measured in ("both", "either") or isinstance(att, Attention) == (measured == CLOSED)
    if measured == "both":
        streams = [layer.attention.perturbed for layer in found]
        assert streams == ["input", "input", "queries", "memory"]


def test_heads_that_hardly_move_are_measured_like_others():
    """Where every probability is all but one or zero, much of a derivative by queries is rounding,
    and automatic differentiation is not refused for that."""
    model = build(crossing).double()
    with torch.no_grad():
        model.q.weight[:6] *= 40
    (automatic, _), (closed, _) = (lb.capture(model, wide(BOTH), closed=c) for c in (False, True))
    found = lb.spectral_norm(automatic, tol=1e-6).lower
    expected = torch.linalg.matrix_norm(lb.HeadJacobian(closed).dense(), 2).view(2, 4)
    assert bool((expected[:, 0] < 1e-9).all())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-13)


def test_tokens_that_stand_before_samples():
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
    mine = lb.Attention(x.transpose(0, 1), *w, b_q=b_q, b_k=b_k, b_v=b_v)
    check(att, lb.spectral_norm(mine, tol=1e-9).lower, sample=slice(None), rtol=1e-7)
    model = build(lambda: tf.XLNetModel(tf.XLNetConfig(**XLNET))).double()
    mask = torch.ones(2, 9).index_fill(1, torch.arange(3), 0.0)
    batch = {"input_ids": IDS_9, "attention_mask": mask}
    (att,) = lb.capture(model, batch)
    assert isinstance(att, lb.ModuleAttention)
    assert "adds other products of its tokens" in att.reason
    own, given = model.layer[0].rel_attn, given_to(model, "layer.0.rel_attn", batch)
    core, seen = own.rel_attn_core, list[Tensor]()
    own.rel_attn_core = lambda *args, **kwargs: seen.append(core(*args, **kwargs)) or seen[-1]

    def heads(x):  # (N, samples, D) to (N, samples, heads, d_v)
        own(**{**given, "h": torch.stack([given["h"][:, 0], x], 1)})
        return seen[-1][:, 1]

    # masked tokens attend to themselves, and so are no padding
    check(att, norms(heads, given["h"][:, 1]), sample=1, rtol=1e-7)


def test_queries_that_are_keys_as_well_have_no_closed_form():
    """One of their streams moves queries and keys, and cross-attention in closed form holds one."""
    model = build(anchors).double()
    found = lb.capture(model, {"encoder_hidden_states": Y.double(), "x": X.double()})
    assert [layer.perturbed for layer in found] == ["queries", "memory"]
    assert isinstance(found[0], lb.ModuleAttention)
    heads = before(model.out, lambda x: model(Y.double()[:1], x))
    check(found[0], norms(heads, X.double()[:1]))


@pytest.mark.parametrize("sizes", [[11], [6, 5]])
def test_streams_of_one_softmax_move_together(sizes):
    m = build(joint).double()
    (att,) = lb.capture(m, {"x": X.double(), "y": Y.double(), "sizes": sizes})
    assert (att.tokens, att.samples) == (11, 2)
    projections = (m.out, m.apart)[: len(sizes)]
    parts = [before(one, lambda z: m(z[:, :6], z[:, 6:], sizes)) for one in projections]
    both = torch.cat([X, Y], 1)[:1].double()
    check(att, norms(lambda z: torch.cat([part(z) for part in parts], 1), both))


@newer_transformers("the projections of Swin have other names")
@pytest.mark.parametrize("kind", ["closed", "automatic"])
def test_windows_of_pictures(kind):
    """Windows stand where samples do; their norms are those of the module, window by window."""
    model = build(lambda: tf.SwinModel(tf.SwinConfig(**SWIN, window_size=4))).double()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    inputs = {"pixel_values": pixels}
    for layer in Capturer(model, closed=kind == "closed").run(inputs):
        att = layer.attention
        assert isinstance(att, Attention) == (kind == "closed")
        assert (layer.windows, att.samples, att.tokens) == (4, 8, 16)
        check(att, own_norms(model, layer.name, inputs, att), rtol=2e-6)


def test_random_numbers_are_the_same_in_every_pass():
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


def test_an_empty_cache_stays_empty():
    """A cache that the pass fills is empty again when a module of it is run by itself."""
    model = build(lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA_1)))

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids):
            return self.inner(input_ids, use_cache=True).last_hidden_state

    (plain,) = lb.capture(model, WORDS)
    (layer,) = Capturer(Caching(), closed=False).run(WORDS)
    assert layer.name.endswith("self_attn")
    expected = lb.spectral_norm(layer.attention, tol=1e-6).lower
    check(plain, expected, sample=slice(None), tol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("shape", [(6, 24), (2, 2, 3, 24)])
def test_tokens_of_any_layout_have_a_closed_form(shape):
    module = build(packed).double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ((some,), (others,)) = (lb.capture(module, {"x": x}, closed=c) for c in (True, False))
    assert (type(some), some.tokens) == (Attention, 6)
    assert isinstance(others, lb.ModuleAttention)
    check(some, lb.spectral_norm(others, tol=1e-9).lower, sample=slice(None))
    check(some, norms(before(module.out, module), x[:1] if len(shape) > 2 else x), rtol=1e-8)


@pytest.mark.parametrize("closed", [True, False])
def test_copies_of_tokens_are_one_stream(closed):
    module = build(Around).double()
    (layer,) = Capturer(module, closed=closed).run({"x": X.double()})
    assert (layer.name, isinstance(layer.attention, Attention)) == ("inner", closed)
    heads = before(module.inner.out, lambda x: module.inner(x, x, x))
    expected = norms(heads, module.norm(X.double())[:1])
    check(layer.attention, expected)
    if closed:
        ds = lb.compare(module, X, bounds="none", dtype="float64", progress=False)
        assert ds["exact"].values[0, 0] == pytest.approx(expected.numpy(), rel=1e-3, abs=0)
