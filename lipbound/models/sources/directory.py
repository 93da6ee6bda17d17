"""Checkpoints in a directory of this machine, or in a GGUF file."""

from pathlib import Path

from lipbound.errors import CheckpointError
from lipbound.models.checkpoint import Checkpoint
from lipbound.models.readers.files import is_path
from lipbound.models.sources import gguf
from lipbound.models.sources.folder import FolderSource, check_directory
from lipbound.models.sources.source import LoadOptions
from lipbound.models.sources.suggestions import suggestion


class DirectorySource(FolderSource):
    """A directory with config.json and weights, as save_pretrained writes it, or with a GGUF file;
    or such a file itself."""

    def load(self, model: str | Path, options: LoadOptions) -> Checkpoint:
        """The model from its folder or its GGUF file; see `load_folder` and `load_gguf` beside this
        module."""
        name = str(model)
        file = _gguf(Path(name).expanduser(), options.gguf_file, name)
        if file is None:
            return super().load(model, options)
        if options.revision is not None:
            raise CheckpointError(
                f"revision {options.revision!r} was given for the GGUF file {file}; revisions "
                "are for hub models"
            )
        return gguf.load_gguf(name, file, None, options)

    def names(self, name: str) -> bool:
        """Whether something is there, or the name cannot be a hub id."""
        return (
            Path(name).expanduser().exists()
            or is_path(name)
            or name.count("/") > 1
            or _is_gguf(name)
        )

    def locate(self, name: str, revision: str | None) -> tuple[Path, None]:
        """The directory; raises CheckpointError where it is none, lacks its files, or a revision of
        it is wanted."""
        path = Path(name).expanduser()
        if path.is_dir():
            if revision is not None:
                raise CheckpointError(
                    f"revision {revision!r} was given for the directory {name}; revisions are "
                    "for hub models"
                )
            check_directory(path, str(path))
            return path, None
        if path.exists():
            raise CheckpointError(
                f"{name} is a file; give the directory that holds config.json and the weights, "
                "or a GGUF file"
            )
        if _is_gguf(name):
            raise CheckpointError(
                f"there is no file {name}; "
                f"{suggestion(name, 'of a hub model, give its id and the file as gguf_file=')}"
            )
        raise CheckpointError(
            f"there is no directory {name}; "
            + suggestion(
                name, "give a checkpoint directory, a hub id such as owner/name, or builtin:minilm"
            )
        )


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(gguf.SUFFIX)


def _gguf(path: Path, wanted: str | None, name: str) -> Path | None:
    """The GGUF file that a path leads to; None where it leads to none.

    A directory that has a config.json is what save_pretrained wrote, unless a GGUF file in it is
    ``wanted``.
    """
    if path.is_file() and _is_gguf(path.name):
        if wanted not in (None, path.name):
            raise CheckpointError(
                f"gguf_file is {wanted!r}, but {name} is a GGUF file itself; give one of the two"
            )
        return path
    plain = wanted is None and (
        (path / "config.json").exists() or not any(path.glob(f"*{gguf.SUFFIX}"))
    )
    return None if plain or not path.is_dir() else gguf.choose(path, wanted, name)
