"""Small random transformers models, saved as checkpoints where a test wants a directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 32}
TEXT = {"vocab_size": 60, "max_position_embeddings": 40, **SMALL}
IMAGE = {"image_size": 16, "patch_size": 4, **SMALL}
GPT2 = {"vocab_size": 60, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}

Make = Callable[[], tf.PreTrainedModel]


def model_of(name: str, **sizes: Any) -> Make:
    """What makes a random model of a name in transformers, of a configuration of such sizes."""
    config = f"{name.removesuffix('Encoder')}Config"
    return lambda: getattr(tf, f"{name}Model")(getattr(tf, config)(**sizes))


AFFINE: dict[str, Make] = {
    "bert": model_of("Bert", **TEXT),
    "roberta": model_of("Roberta", **TEXT),
    "electra": model_of("Electra", **TEXT, embedding_size=16),
    "distilbert": model_of(
        "DistilBert", vocab_size=60, dim=24, n_layers=2, n_heads=4, hidden_dim=32
    ),
    "albert": model_of("Albert", **TEXT, embedding_size=16),
    "gpt2": model_of("GPT2", **GPT2),
    "gpt2 scaled by layer": model_of("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True),
    "opt": model_of("OPT", **TEXT, ffn_dim=32, word_embed_proj_dim=24),
    "vit": model_of("ViT", **IMAGE),
    "deit": model_of("DeiT", **IMAGE),
    "dinov2": model_of("Dinov2", **IMAGE),
    "beit": model_of(
        "Beit", **IMAGE, use_relative_position_bias=False, use_shared_relative_position_bias=False
    ),
    "clip text": model_of("CLIPText", **TEXT, eos_token_id=2),
    "siglip vision": model_of("SiglipVision", **IMAGE),
}
LLAMA = {**TEXT, "num_key_value_heads": 2}
WIDE = {**TEXT, "hidden_size": 32, "pad_token_id": None}
NARROW = {**LLAMA, "head_dim": 8, "sliding_window": 4}
MIX = ["sliding_attention", "full_attention"]
SHORT = {"original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **SHORT}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5, **SHORT}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {"vocab_size": 60, "d_model": 24, "d_kv": 6, "d_ff": 32, "num_layers": 1, "num_heads": 4}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LOCAL = {"attention_bias": True, "local_attention": 4, "global_attn_every_n_layers": 2}

MODERN: dict[str, Make] = {
    "Llama": model_of("Llama", **LLAMA, attention_bias=True),
    "Llama 3": model_of("Llama", **LLAMA, rope_parameters=LLAMA3),
    "Llama, YaRN": model_of("Llama", **LLAMA, rope_parameters=YARN),
    "Mistral": model_of("Mistral", **NARROW),
    "Qwen 2": model_of("Qwen2", **LLAMA),
    "Qwen 3": model_of("Qwen3", **LLAMA, head_dim=8, attention_bias=True),
    "Gemma": model_of("Gemma", **TEXT, num_key_value_heads=1, head_dim=8),
    "Gemma 2": model_of("Gemma2", **NARROW, attn_logit_softcapping=2.0, layer_types=MIX),
    "Gemma 3": model_of("Gemma3Text", **NARROW, layer_types=MIX),
    "Phi": model_of("Phi", **WIDE),
    "Phi, q/k-norm": model_of("Phi", **WIDE, qk_layernorm=True),
    "GPT-NeoX": model_of("GPTNeoX", **WIDE),
    "GPTBigCode": model_of("GPTBigCode", **GPT2, **IDS),
    "gpt-oss": model_of("GptOss", **NARROW, **EXPERTS, rope_parameters=YARN, layer_types=MIX),
    "OLMo 2": model_of("Olmo2", **LLAMA, attention_bias=True, **IDS),
    "ModernBERT": model_of("ModernBert", **TEXT, **IDS, **LOCAL, cls_token_id=1, sep_token_id=2),
    "T5 encoder": model_of("T5Encoder", **{**T5, "num_layers": 2}),
    "Cohere": model_of("Cohere", **LLAMA, **IDS, use_qk_norm=True),
    "Cohere 2": model_of("Cohere2", **LLAMA, **IDS, sliding_window=4, layer_types=MIX),
    "GLM": model_of("Glm", **LLAMA, **IDS, head_dim=8, attention_bias=True),
    "StableLM, q/k-norm": model_of("StableLm", **WIDE, num_key_value_heads=2, qk_layernorm=True),
    "Llama 4": model_of(
        "Llama4Text", **LLAMA, **IDS, head_dim=8, num_local_experts=2, intermediate_size_mlp=32
    ),
    "ESM": model_of("Esm", **TEXT, pad_token_id=1, position_embedding_type="rotary"),
    "DINOv3": model_of("DINOv3ViT", **{**IMAGE, "hidden_size": 32}, num_register_tokens=2),
}
"""Attention of today's language models: rotation, shared keys, q/k-norm, caps, sinks, windows,
relative biases."""
LATENT = {**TEXT, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "n_group": 2}
LATENT |= {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"topk_group": 1, "first_k_dense_replace": 2}
GATED = {**LLAMA, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
GATED |= {"layer_types": ["full_attention"] * 2}


SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}
BART = {"vocab_size": 60, "d_model": 24, "max_position_embeddings": 40}
BART |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDE.items()}
MARIAN = {**BART, "pad_token_id": 0, "decoder_start_token_id": 0}
SEQ2SEQ: dict[str, Make] = {
    "bart": model_of("Bart", **BART),
    "marian": model_of("Marian", **MARIAN),
    "t5": model_of("T5", **T5),
}


def build(make: Make, seed: int = 0) -> tf.PreTrainedModel:
    """A model with random weights, nonzero biases included."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name:
                parameter.normal_(std=0.5)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)  # away from uniform attention
    return model


def inputs_for(
    model: tf.PreTrainedModel, padded: bool = False, length: int = 9
) -> dict[str, torch.Tensor]:
    """Two random samples of so many tokens, the second padded by three when asked for."""
    g = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}
    batch = {"input_ids": torch.randint(3, 60, (2, length), generator=g)}
    if padded:
        batch["attention_mask"] = torch.tensor([[1] * length, [1] * (length - 3) + [0] * 3])
    return batch


def wide(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of a float64 model."""
    return {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of 60 tokens with [CLS], [SEP] and [PAD]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *"the a of ferry island clock lighthouse and is in keeper".split()]
    words += [f"w{k}" for k in range(60 - len(words))]
    core = Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    named = {f"{word[1:-1].lower()}_token": word for word in special}
    fast = tf.PreTrainedTokenizerFast(tokenizer_object=core, **named, model_max_length=40)
    fast.save_pretrained(folder)


def save_bert(folder: Path) -> Path:
    """A random BERT with tokenizer."""
    build(AFFINE["bert"]).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_vit(folder: Path) -> Path:
    """A random ViT with image processor."""
    build(AFFINE["vit"]).save_pretrained(folder)
    tf.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder
