"""Everything about the package but one text is in setup.cfg: its description, which is README.md
without links to files of the repository."""

import re
from pathlib import Path

from setuptools import setup


def plain_links(text: str) -> str:
    """Markdown with pictures left out and links to relative paths as their text: on a package index
    they lead nowhere."""
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=plain_links(readme), long_description_content_type="text/markdown")
