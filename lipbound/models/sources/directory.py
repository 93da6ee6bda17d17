"""Checkpoints in a directory of this machine."""

import os
from pathlib import Path

from lipbound.errors import CheckpointError
from lipbound.models.sources.folder import FolderSource, check_directory
from lipbound.models.sources.known import suggestion


class DirectorySource(FolderSource):
    """A directory with config.json and weights, as save_pretrained writes it."""

    def names(self, name: str) -> bool:
        """Whether something is there, or the name cannot be a hub id."""
        return Path(name).expanduser().exists() or name.startswith((".", "~", os.sep)) or name.count("/") > 1

    def locate(self, name: str, revision: str | None) -> tuple[Path, None]:
        """The directory; raises CheckpointError where it is none, lacks its files, or a revision of it is wanted."""
        path = Path(name).expanduser()
        if path.is_dir():
            if revision is not None:
                raise CheckpointError(f"revision {revision!r} was given for the directory {name}; revisions are for hub models")
            check_directory(path, str(path))
            return path, None
        if path.exists():
            raise CheckpointError(f"{name} is a file; give the directory that holds config.json and the weights")
        raise CheckpointError(
            f"there is no directory {name}; {suggestion(name, 'give a checkpoint directory, a hub id such as owner/name, or builtin:minilm')}"
        )
