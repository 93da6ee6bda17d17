"""Names of checkpoints that can be meant: builtins, directories nearby, models in the hub's cache, and often used ones."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from lipbound.errors import neighbours
from lipbound.models.sources.builtins import BUILTINS, PREFIX

OFTEN_USED = (
    "bert-base-uncased", "bert-base-cased", "bert-large-uncased", "distilbert-base-uncased", "roberta-base", "albert-base-v2",
    "google/electra-base-discriminator", "sentence-transformers/all-MiniLM-L6-v2", "answerdotai/ModernBERT-base", "gpt2", "gpt2-medium",
    "gpt2-large", "gpt2-xl", "distilgpt2", "facebook/opt-125m", "EleutherAI/pythia-70m", "EleutherAI/pythia-160m", "Qwen/Qwen2-0.5B",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1", "google/gemma-2-2b",
    "google/gemma-3-1b-pt", "google/vit-base-patch16-224", "google/vit-large-patch16-224", "facebook/deit-base-patch16-224",
    "facebook/dinov2-base", "facebook/dinov2-small", "openai/clip-vit-base-patch32",
)  # fmt: skip
"""Hub ids."""


def suggestion(name: str, otherwise: str) -> str:
    """The part of a message that names the checkpoints nearest to a name, or else what to do."""
    wanted = name.partition("@")[0].rstrip("/")
    listed = dict.fromkeys((*(PREFIX + one for one in BUILTINS), *OFTEN_USED, *_cached()))
    by_end = {one.rpartition("/")[2].removeprefix(PREFIX): one for one in (*reversed(listed), *_beside(wanted))}
    close = neighbours(wanted, listed, cutoff=0.75)
    close += [by_end[one] for one in neighbours(wanted.rpartition("/")[2], by_end, cutoff=0.75)]
    found = [one for one in dict.fromkeys(close) if one != name][:3]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else otherwise


def _cached() -> Iterator[str]:
    """Hub ids of models that were fetched before."""
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        yield folder.name.removeprefix("models--").replace("--", "/", 1)


def _beside(name: str) -> Iterator[str]:
    """Checkpoint directories in the folder where one of that name would be."""
    parent = Path(name).expanduser().parent
    try:
        folders = [folder for folder in parent.iterdir() if (folder / "config.json").exists()]
    except (OSError, ValueError):
        return
    for folder in folders:
        yield str(Path(name).parent / folder.name) if str(Path(name).parent) != "." else folder.name
