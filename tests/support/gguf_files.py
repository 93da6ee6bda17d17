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
Kind = gguf.GGMLQuantizationType


def llama() -> tf.LlamaModel:
    """A random one."""
    others = {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    others |= {"bos_token_id": 0, "eos_token_id": 1}
    return build(lambda: tf.LlamaModel(tf.LlamaConfig(**SIZES, **others)))


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
    for name, value in {
        "context_length": 64,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e4,
        "vocab_size": len(WORDS),
    }.items():
        getattr(writer, f"add_{name}")(value)
    if file_type:
        writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    if tokenizer:
        _tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stood_for = {}
    for name, weight in model.state_dict().items():
        part = name.split(".")[-2]
        rotated = {"q_proj": "attention", "k_proj": "key_value"}.get(part)
        groups = rotated and SIZES[f"num_{rotated}_heads"]
        how = Kind.F32 if weight.ndim == 1 else Kind.Q8_0 if part == "embed_tokens" else kind
        packed = gguf.quantize((_permuted(weight, groups) if groups else weight).numpy(), how)
        writer.add_tensor(names.get_name(f"model.{name}", (".weight",)), packed, raw_dtype=how)
        value = torch.from_numpy(np.array(gguf.dequantize(packed, how)))
        stood_for[name] = _permuted(value, groups, back=True) if groups else value
    written(writer)
    return stood_for


def written(writer: gguf.GGUFWriter) -> None:
    """Write a file whole."""
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    kinds = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([kinds[k > 1] for k in range(len(WORDS))])
    writer.add_token_merges(MERGES)
    for name, token in {"bos": 0, "eos": 1, "unk": 0, "pad": 1}.items():
        getattr(writer, f"add_{name}_token_id")(token)


def _permuted(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """Rows of every head with the two halves that are rotated together side by side, as llama.cpp
    keeps them; or ``back``."""
    shape = (heads, -1, 2) if back else (heads, 2, weight.shape[0] // heads // 2)
    return weight.reshape(*shape, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()
