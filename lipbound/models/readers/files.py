"""Names of files and folders, and what their endings say about their contents."""

import gzip
import re
from pathlib import Path
from typing import Any

from lipbound.errors import InputsError, one_line

TABLES = {
    ".parquet": "parquet",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
}
"""Endings of tables, and the loader of `datasets` that reads them."""
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of images."""
TEXT_FILES = (".txt", ".md", ".text", ".tex", ".html", ".rst", ".log", ".safetensors", ".zarr")
"""Endings of names that are meant as files, whatever blanks are in them."""
PROSE = (".txt", ".text")
"""Endings of the files of a folder that are read as texts."""
PACKED = ".gz"
"""Ending, behind another, of a file that is packed with gzip."""


def there(data: Any) -> Path | None:
    """Return the path of the file or folder that something names, or None where there is none."""
    try:
        path = Path(data).expanduser() if isinstance(data, str | Path) else None
        return path if path is not None and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, or not a path at all
        return None


def ending(path: Path) -> str:
    """Return the ending of a name in small letters; of a packed file, that of its contents.

    >>> ending(Path("A.TXT")), ending(Path("b.csv.gz"))
    ('.txt', '.csv')
    """
    return Path(path.stem if path.suffix.lower() == PACKED else path.name).suffix.lower()


def visible(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, but for hidden ones."""
    files = ((f, f"/{f.relative_to(folder).as_posix()}") for f in folder.rglob("*") if f.is_file())
    return sorted(file for file, place in files if "/." not in place)


def is_path(name: str) -> bool:
    r"""Return whether a name can only be that of a file or folder, on any system, and no hub id.

    >>> is_path("./bert"), is_path(r"C:\models\bert"), is_path("owner/bert"), is_path("news:raw")
    (True, True, False, False)
    """
    return rooted(name) or "\\" in name


def rooted(name: str) -> bool:
    """Return whether a name says where it begins: here, at home, at a root or on a drive."""
    return name.startswith((".", "~", "/", "\\\\")) or re.match(r"[A-Za-z]:[/\\]", name) is not None


def is_plain_file(data: Any) -> bool:
    """Return whether something is the path of a file that is not a table."""
    path = there(data)
    return path is not None and path.is_file() and ending(path) not in TABLES


def is_saved(path: Path) -> bool:
    """Return whether a folder is one that ``save_to_disk`` of a dataset wrote."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def is_sentence(data: Any) -> bool:
    """Return whether something is itself a text: several words not meant as a file's name.

    >>> is_sentence("how smooth is attention?"), is_sentence("my file.txt"), is_sentence("ag_news")
    (True, False, False)
    """
    if not isinstance(data, str) or len(data.split()) < 2 or there(data) or rooted(data):
        return False
    if "\n" in data or len(data) > 200:
        return True
    named = ending(Path(data)) in (*TABLES, *IMAGE_FILES, *TEXT_FILES)
    return not named and ("/" not in data or there(str(Path(data).parent)) is None)


def read_text(path: Path) -> str:
    """Return the whole of a UTF-8 file, unpacked where it is packed with gzip.

    Raises:
        InputsError: the file cannot be read, or is not such a file.
    """
    packed = path.suffix.lower() == PACKED
    try:
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8") as file:
            return str(file.read())
    except UnicodeDecodeError as error:
        raise InputsError(f"{path} is not a UTF-8 text file") from error
    except (OSError, EOFError) as error:
        raise InputsError(f"{path} cannot be read: {one_line(error)}") from error
