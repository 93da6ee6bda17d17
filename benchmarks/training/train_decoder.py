"""Train ``builtin:gpt2``, ``builtin:llama`` or ``builtin:qwen3``: a small decoder with its own
byte-level BPE on the text of one book.

    python benchmarks/training/train_decoder.py --architecture qwen3 --text alice.txt --out
    lipbound/models/builtin/qwen3

Minutes on two CPU cores. The last tenth of the text is held out and its perplexity reported in the
model card. All three have the same depth, width, heads, text and steps; llama has rotary
embeddings, RMSNorm, SwiGLU and two key/value heads, and qwen3 normalises queries and keys besides.
"""

import argparse
import time
from pathlib import Path

import torch
from common import decay_groups, one_cycle, save
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

CARD = """---
license: mit
library_name: transformers
---
# A small {name}, trained on Alice's Adventures in Wonderland

{name} architecture, {layers} layers x {heads} heads, width {width}, context {context}, byte-level BPE of {vocab} tokens;
trained from scratch by `benchmarks/training/train_decoder.py` on *Alice's Adventures in Wonderland* (Lewis Carroll, 1865;
public domain), {steps} steps of {batch} x {length} tokens, AdamW. Held-out perplexity (last tenth of the book): {ppl:.1f} per
token; on the training part {train_ppl:.1f}.

It is a real, trained decoder that fits in a Python package, there to try lipbound on. It is no language model to build on:
it has read one book.
"""  # noqa: E501


NAMES = {"gpt2": "GPT-2", "llama": "Llama", "qwen3": "Qwen 3"}


def configuration(
    args: argparse.Namespace, vocab: int, end: int
) -> GPT2Config | LlamaConfig | Qwen3Config:
    """The architecture that was asked for; ``end``: the token that begins and ends texts."""
    if args.architecture == "gpt2":
        return GPT2Config(
            vocab_size=vocab,
            n_positions=args.context,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            resid_pdrop=args.dropout,
            embd_pdrop=args.dropout,
            attn_pdrop=args.dropout,
            bos_token_id=end,
            eos_token_id=end,
        )
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[args.architecture]
    return kind(
        vocab_size=vocab,
        max_position_embeddings=args.context,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        head_dim=args.width // args.heads,
        intermediate_size=8 * args.width // 3 // 8 * 8,
        attention_dropout=args.dropout,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=None,
    )


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: torch.Tensor, length: int) -> float:
    """Perplexity per token of ``ids`` cut into windows of ``length``."""
    model.eval()
    windows = ids[: len(ids) // length * length].view(-1, length)
    losses = [model(input_ids=w, labels=w).loss for w in windows.split(32)]
    model.train()
    return float(torch.stack(losses).mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=list(NAMES), default="gpt2")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    text = args.text.read_text()
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [text], vocab_size=args.vocab, special_tokens=["<|endoftext|>"], show_progress=False
    )
    special = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=special,
        eos_token=special,
        unk_token=special,
        model_max_length=args.context,
    )
    cut = int(0.9 * len(text))
    train = torch.tensor(tokenizer(text[:cut]).input_ids)
    held_out = torch.tensor(tokenizer(text[cut:]).input_ids)
    print(f"{len(train):,} training tokens, {len(held_out):,} held out")

    model = AutoModelForCausalLM.from_config(
        configuration(args, len(tokenizer), tokenizer.bos_token_id)
    ).train()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: one_cycle(s, args.steps))
    offsets = torch.arange(args.length)
    began = time.time()
    for step in range(args.steps):
        starts = torch.randint(len(train) - args.length, (args.batch, 1))
        batch = train[starts + offsets]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            ppl = perplexity(model, held_out, args.length)
            print(
                f"step {step + 1} loss {loss:.3f} held-out perplexity {ppl:.1f} "
                f"{time.time() - began:.0f} s",
                flush=True,
            )

    card = CARD.format(
        name=NAMES[args.architecture],
        **{
            k: getattr(args, k)
            for k in ("layers", "heads", "width", "context", "steps", "batch", "length")
        },
        vocab=len(tokenizer),
        ppl=perplexity(model, held_out, args.length),
        train_ppl=perplexity(model, train, args.length),
    )
    save(model, args.out, card)
    tokenizer.save_pretrained(args.out)
    print(card)


if __name__ == "__main__":
    main()
