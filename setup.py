"""The description of the package: README.md without links to files. All else is in setup.cfg."""

import re
from pathlib import Path

from setuptools import setup


def plain_links(text: str) -> str:
    """Leave out pictures and relative links, which lead nowhere on a package index."""
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=plain_links(readme), long_description_content_type="text/markdown")
