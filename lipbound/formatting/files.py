"""Files that take the place of older ones only when they are whole."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lipbound.errors import StoreError


@contextmanager
def replacing(*targets: str | Path) -> Iterator[list[Path]]:
    """Give a path beside each target to write to; when all is written, they take the targets'
    places together, and otherwise nothing has changed.

    Folders are made where they are missing. A target that is no ordinary file, such as a pipe, is
    written to directly.

    Args:
        targets: the files to write.

    Raises:
        StoreError: one of them cannot be written; whatever had these names before is still there.
    """
    ends = [
        Path(os.path.realpath(Path(target).expanduser())) for target in targets
    ]  # where a link leads is replaced, not the link
    special = [end.exists() and not end.is_file() for end in ends]
    beside = [
        end if is_special else end.with_name(f".{end.stem}.{os.getpid()}.partial{end.suffix}")
        for end, is_special in zip(ends, special, strict=True)
    ]
    written = [path for path, is_special in zip(beside, special, strict=True) if not is_special]
    try:
        for end in ends:
            end.parent.mkdir(parents=True, exist_ok=True)
            if end.exists() and not os.access(end, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(end))
        yield beside
        for path in written:
            _settle(path)
        for path, end in zip(beside, ends, strict=True):
            if path != end:
                if end.exists():
                    shutil.copymode(end, path)
                path.replace(end)
    except OSError as error:
        raise StoreError(f"{targets[0]} cannot be written: {error.strerror or error}") from error
    finally:
        for path in written:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _settle(path: Path) -> None:
    """Wait until a file is on the disk: some file systems find out only then that they are full."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
