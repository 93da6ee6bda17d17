"""The source tree of the site, as one mapping: where every page and every file stands, links
between them set right.

Pages under docs/, the notebooks, and a few files of the repository keep the links that work in the
repository; here these become links within the site. Nothing needs Sphinx.
"""

import posixpath
import re
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sitegen import api, bounds, cli, gallery, measured, pictures, published

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/guide.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "SECURITY.md": "contributing/security.md",
    "CODE_OF_CONDUCT.md": "contributing/conduct.md",
    "figures/README.md": "findings/papers.md",
}
"""Pages of the repository that stand elsewhere on the site. The README is for those who come to the
repository; the site has a start page."""
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\[\]]*\])*\]\()([^()\s]+)(\))")
FIGURE = re.compile(r"(^```\{figure\} )(\S+)()$", re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
LEMMA = re.compile(r"^(### Lemma (\d+) \()", re.MULTILINE)
LEMMA_LINK = re.compile(r"\[(Lemma (\d+))\]\(\w+\.md\)")

DRAWN = {f"pictures/{name}.svg": draw for name, draw in pictures.PICTURES.items()}
"""Pictures that are drawn when the site is written, by their places."""


@dataclass
class Tree:
    """The site before Sphinx: texts of pages and copies of files, by their places."""

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)

    def file(self, path: str) -> str:
        """The place of a file of the repository, which is copied there."""
        place = f"files/{path}"
        if place.endswith(".md"):
            place += ".txt"  # shown as it is, not as a page
        self.files[place] = ROOT / path
        return place

    def place_of(self, path: str) -> str | None:
        """Where something of the repository stands on the site; None where it is not there to be
        shown."""
        if path in MOVED:
            return MOVED[path]
        if path.startswith("notebooks/") and path.endswith(".ipynb"):
            return f"gallery/{Path(path).name}"
        inside = path.removeprefix("docs/")
        if path.startswith("docs/") and (
            inside in self.pages or inside in self.files or inside in DRAWN
        ):
            return inside
        return self.file(path) if (ROOT / path).is_file() else None

    def relinked(self, text: str, origin: str, place: str) -> str:
        """The text of a page with its links set right.

        Args:
            text: as it is written.
            origin: the path in the repository that its links are relative to.
            place: where the page stands on the site.
        """

        def change(match: re.Match[str]) -> str:
            target, _, anchor = match[2].partition("#")
            if not target or re.match(r"[a-z]+:", match[2]):
                return match[0]
            path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
            found = self.place_of(path)
            if found is None:
                return match[0]
            relative = posixpath.relpath(found, posixpath.dirname(place) or ".")
            return f"{match[1]}{relative}{'#' + anchor if anchor else ''}{match[3]}"

        parts = FENCE.split(FIGURE.sub(change, text))
        return "".join(part if i % 2 else LINK.sub(change, part) for i, part in enumerate(parts))


def lemmas_labelled(text: str) -> str:
    """A page of theory whose lemmas can be referred to: ``lemma-7`` is a label, and links to lemmas
    lead to them."""
    return LEMMA_LINK.sub(r"[\1](#lemma-\2)", LEMMA.sub(r"(lemma-\2)=\n\1", text))


def handwritten() -> dict[str, str]:
    """Pages under docs/ as they are written, by their places on the site."""
    paths = [path for path in sorted(DOCS.rglob("*.md")) if "sitegen" not in path.parts]
    return {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def generated() -> dict[str, str]:
    """Pages written from the package and from what was measured."""
    return {**bounds.pages(), **published.pages(), **cli.pages(), **api.pages(), **gallery.pages()}


def filled(text: str) -> str:
    """A page with generated parts where ``<!-- table: NAME -->`` stands.

    Raises:
        KeyError: no part has the name.
    """
    return re.sub(
        r"^<!-- table: (\w+) -->$",
        lambda match: measured.PARTS[match[1]](),
        text,
        flags=re.MULTILINE,
    )


@cache
def assemble() -> Tree:
    """The whole source of the site but for pictures, which are drawn when it is written."""
    tree = Tree()
    texts, origins = {}, {}
    for place, text in {**handwritten(), **generated()}.items():
        texts[place], origins[place] = text, f"docs/{place}"
    for path, place in MOVED.items():
        if path != "README.md":
            texts[place], origins[place] = (ROOT / path).read_text(encoding="utf-8"), path
    tree.pages = dict(texts)  # known before links are followed
    for number, name in enumerate(gallery.NOTEBOOKS):
        texts[f"gallery/{name}"] = (ROOT / "notebooks" / name).read_text(encoding="utf-8")
        # replaced by its picture when written
        tree.files[gallery.thumbnail_place(number)] = ROOT / "notebooks" / name
    for place, text in texts.items():
        if place.startswith("theory/"):
            text = lemmas_labelled(text)
        if place.endswith(".md"):
            text = tree.relinked(filled(text), origins[place], place)
        tree.pages[place] = text
    return tree


def write(folder: Path) -> None:
    """Lay the source of the site under ``folder``, pictures included; what stood there
    is removed."""
    tree = assemble()
    shutil.rmtree(folder, ignore_errors=True)
    for place, text in tree.pages.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for place, path in tree.files.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".ipynb":
            gallery.thumbnail(path, target)
        else:
            shutil.copyfile(path, target)
    for place, draw in DRAWN.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        draw(target)
