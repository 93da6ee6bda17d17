"""What the ending of a file says about what is in it."""

import re
from pathlib import Path
from typing import Any

TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Endings of tables, and the loader of `datasets` that reads them."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of images."""


TEXT_FILES = (".txt", ".md", ".text", ".tex", ".html", ".rst", ".log", ".safetensors", ".zarr")
"""Endings of names that are meant as files, whatever blanks are in them."""


def there(data: Any) -> Path | None:
    """The file or folder that something names, or None."""
    try:
        path = Path(data).expanduser() if isinstance(data, str | Path) else None
        return path if path is not None and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, or not a path at all
        return None


def is_path(name: str) -> bool:
    """Whether a name can only be that of a file or folder, there or not, of this system or of another: no hub id looks like it.

    >>> is_path("./bert"), is_path(r"C:\\models\\bert"), is_path("owner/bert"), is_path("wikitext:wikitext-2-raw-v1")
    (True, True, False, False)
    """
    return rooted(name) or "\\" in name


def rooted(name: str) -> bool:
    """Whether a name says where it begins: here, at home, at a root or on a drive."""
    return name.startswith((".", "~", "/", "\\\\")) or re.match(r"[A-Za-z]:[/\\]", name) is not None


def is_plain_file(data: Any) -> bool:
    """Whether it is the path of a file that is not a table."""
    path = there(data)
    return path is not None and path.is_file() and path.suffix not in TABLES


def is_sentence(data: Any) -> bool:
    """Whether it is text itself: several words that name no file and do not look as if they were meant to.

    >>> is_sentence("how smooth is attention?"), is_sentence("my file.txt"), is_sentence("ag_news")
    (True, False, False)
    """
    if not isinstance(data, str) or len(data.split()) < 2 or there(data) is not None or rooted(data):
        return False
    if "\n" in data or len(data) > 200:
        return True
    return Path(data).suffix.lower() not in (*TABLES, *IMAGE_FILES, *TEXT_FILES) and ("/" not in data or there(str(Path(data).parent)) is None)
