"""Small random transformers models, saved as checkpoints where a test wants a directory."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

TEXT = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "max_position_embeddings": 40}
IMAGE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
GPT2 = {"vocab_size": 60, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}

AFFINE: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "bert": lambda: tf.BertModel(tf.BertConfig(**TEXT)),
    "roberta": lambda: tf.RobertaModel(tf.RobertaConfig(**TEXT)),
    "electra": lambda: tf.ElectraModel(tf.ElectraConfig(**TEXT, embedding_size=16)),
    "distilbert": lambda: tf.DistilBertModel(tf.DistilBertConfig(vocab_size=60, dim=24, n_layers=2, n_heads=4, hidden_dim=32)),
    "albert": lambda: tf.AlbertModel(tf.AlbertConfig(**TEXT, embedding_size=16)),
    "gpt2": lambda: tf.GPT2Model(tf.GPT2Config(**GPT2)),
    "gpt2 scaled by layer": lambda: tf.GPT2Model(tf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)),
    "opt": lambda: tf.OPTModel(tf.OPTConfig(**TEXT, ffn_dim=32, word_embed_proj_dim=24)),
    "vit": lambda: tf.ViTModel(tf.ViTConfig(**IMAGE)),
    "deit": lambda: tf.DeiTModel(tf.DeiTConfig(**IMAGE)),
    "dinov2": lambda: tf.Dinov2Model(tf.Dinov2Config(**IMAGE)),
    "beit": lambda: tf.BeitModel(tf.BeitConfig(**IMAGE, use_relative_position_bias=False, use_shared_relative_position_bias=False)),
    "clip text": lambda: tf.CLIPTextModel(tf.CLIPTextConfig(**TEXT, eos_token_id=2)),
    "siglip vision": lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**IMAGE)),
}  # fmt: skip
LLAMA = {**TEXT, "num_key_value_heads": 2}
REFUSED: dict[str, tuple[Callable[[], tf.PreTrainedModel], str]] = {
    "llama": (lambda: tf.LlamaModel(tf.LlamaConfig(**LLAMA)), "rotates queries and keys"),
    "mistral": (lambda: tf.MistralModel(tf.MistralConfig(**LLAMA)), "rotates queries and keys"),
    "neox": (lambda: tf.GPTNeoXModel(tf.GPTNeoXConfig(**TEXT)), "rotates queries and keys"),
    "qwen3": (lambda: tf.Qwen3Model(tf.Qwen3Config(**LLAMA, head_dim=6)), "normalises queries and keys"),
    "gemma2": (lambda: tf.Gemma2Model(tf.Gemma2Config(**LLAMA, head_dim=6)), "caps its scores with tanh"),
    "bloom": (lambda: tf.BloomModel(tf.BloomConfig(vocab_size=60, hidden_size=24, n_layer=2, n_head=4)), "never calls"),
    "resnet": (lambda: tf.ResNetModel(tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])), "no attention that can be captured"),
}  # fmt: skip


def build(make: Callable[[], tf.PreTrainedModel], seed: int = 0) -> tf.PreTrainedModel:
    """A model with random weights, nonzero biases included."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)  # away from uniform attention
    return model


def inputs_for(model: tf.PreTrainedModel, padded: bool = False) -> dict[str, torch.Tensor]:
    """Two random samples, the second padded when asked for."""
    g = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}
    batch = {"input_ids": torch.randint(3, 60, (2, 9), generator=g)}
    if padded:
        batch["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    return batch


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of 60 tokens with [CLS], [SEP] and [PAD]."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "of", "ferry", "island", "clock", "lighthouse", "and", "is", "in", "keeper"]
    words += [f"w{k}" for k in range(60 - len(words))]
    core = Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=core, **special, model_max_length=40).save_pretrained(folder)


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
