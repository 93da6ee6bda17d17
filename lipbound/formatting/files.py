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
    """Replace files together, once all of them are written, or none of them.

    Folders are made where they are missing. Where a link leads is replaced, not the link. A target
    that is no ordinary file, such as a pipe, is written to directly.

    Args:
        targets: the files to write.

    Yields:
        A path beside each target to write to.

    Raises:
        StoreError: one of them cannot be written; whatever had these names before is still there.
    """
    ends = [Path(os.path.realpath(Path(target).expanduser())) for target in targets]
    beside = [
        end
        if end.exists() and not end.is_file()
        else end.with_name(f".{end.stem}.{os.getpid()}.partial{end.suffix}")
        for end in ends
    ]
    moved = [(path, end) for path, end in zip(beside, ends, strict=True) if path != end]
    try:
        for end in ends:
            end.parent.mkdir(parents=True, exist_ok=True)
            if end.exists() and not os.access(end, os.W_OK):
                why = os.strerror(errno.EACCES)
                raise StoreError(f"{targets[0]} cannot be written: {why}")
        yield beside
        for path, _ in moved:
            with path.open("rb+") as file:
                os.fsync(file.fileno())  # some file systems find out only then that they are full
        for path, end in moved:
            if end.exists():
                shutil.copymode(end, path)
            path.replace(end)
    except OSError as error:
        raise StoreError(f"{targets[0]} cannot be written: {error.strerror or error}") from error
    finally:
        for path, _ in moved:
            with suppress(OSError):
                path.unlink(missing_ok=True)
