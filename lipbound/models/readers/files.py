"""What the ending of a file says about what is in it."""

from pathlib import Path
from typing import Any

TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Endings of tables, and the loader of `datasets` that reads them."""

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of images."""


def is_plain_file(data: Any) -> bool:
    """Whether it is the path of a file that is not a table."""
    return isinstance(data, str | Path) and Path(data).is_file() and Path(data).suffix not in TABLES
