"""Small GGUF files, as llama.cpp's converter writes them: a Llama with quantised weights and its
tokenizer."""

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as tf
from support.models import build
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

LETTERS = sorted(bytes_to_unicode().values())
WORDS = ["<s>", "</s>", *LETTERS, "th", "the", "fe", "rr", "fe" + "rr"]
MERGES = ["t h", "th e", "f e", "r r", "fe rr"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": len(WORDS),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}
Kind = gguf.GGMLQuantizationType


def llama() -> tf.LlamaModel:
    """A random one."""
    return build(
        lambda: tf.LlamaModel(
            tf.LlamaConfig(
                **SIZES,
                max_position_embeddings=64,
                rms_norm_eps=1e-5,
                bos_token_id=0,
                eos_token_id=1,
            )
        )
    )


def save_gguf(
    file: Path,
    *,
    kind: Kind = Kind.Q4_1,
    tokenizer: bool = True,
    arch: str = "llama",
    file_type: bool = True,
) -> dict[str, Tensor]:
    """Write `llama` with its matrices quantised, its table of tokens in Q8_0 and its norms in
    float32.

    Returns:
        The weights that the file stands for, under the names that transformers has for them.
    """
    model = llama()
    config = model.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    if file_type:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    if tokenizer:
        _tokenizer(writer)
    stood_for = {}
    for name, weight in model.state_dict().items():
        middle = name.removesuffix(".weight")
        _, block, part = middle.split(".", 2) if middle.startswith("layers") else ("", "", middle)
        prefix = f"blk.{block}." if block else ""
        groups = {
            "self_attn.q_proj": config.num_attention_heads,
            "self_attn.k_proj": config.num_key_value_heads,
        }.get(part)
        how = Kind.F32 if weight.ndim == 1 else Kind.Q8_0 if part == "embed_tokens" else kind
        packed = gguf.quantize(
            (weight if groups is None else _permuted(weight, groups)).numpy(), how
        )
        writer.add_tensor(f"{prefix}{NAMES[part]}.weight", packed, raw_dtype=how)
        value = torch.from_numpy(np.array(gguf.dequantize(packed, how)))
        stood_for[name] = value if groups is None else _permuted(value, groups, back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stood_for


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(WORDS) - 2)
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)


def _permuted(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """Rows of every head with the two halves that are rotated together side by side, as llama.cpp
    keeps them; or ``back``."""
    shape = (heads, -1, 2) if back else (heads, 2, weight.shape[0] // heads // 2)
    return weight.reshape(*shape, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()
