"""A Sphinx extension: docstrings of the package as reStructuredText, and references that they leave
short.

Docstrings are written to be read as they are. Plain text in them may hold formulas such as
``max_i |A x_i|``, whose bars and underscores would be markup; names between single backticks lead
to the page of the object where there is one, and are code otherwise.
"""

import importlib
import operator
import re
import sys
from typing import TYPE_CHECKING, Any

import lipbound
from sitegen import api
from sitegen.bounds import docstring

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MARKUP = re.compile(
    r"(``.+?``|:[\w:+-]+:`[^`]+`|`[^`]+`|\*\*[^*\s][^*]*\*\*|(?<![\w*])\*[A-Za-z][^*]*\*(?!\w))"
)
"""Literals, roles, references and emphasis: what stays as it is."""
ROLE = "lipbound"
"""The role of what stands between single backticks."""
TYPE_VARIABLE = re.compile(
    r"(^|\.)([A-Z]|AnyModel|Annotated|Callback|Function|Terms|Layer|Ball|Longest)$|[\[~]"
)
"""Names in signatures that stand for types and have no page."""
SHORT = {
    "Tensor": "torch.Tensor",
    "Dataset": "xarray.Dataset",
    "xr.Dataset": "xarray.Dataset",
    "xr.DataArray": "xarray.DataArray",
    "xr.Variable": "xarray.Variable",
    "np.ndarray": "numpy.ndarray",
    "pd.DataFrame": "pandas.DataFrame",
    "Path": "pathlib.Path",
    "Any": "typing.Any",
    "Module": "torch.nn.Module",
    "PreTrainedModel": "transformers.PreTrainedModel",
    "xarray.core.dataset.Dataset": "xarray.Dataset",
    "xarray.core.dataarray.DataArray": "xarray.DataArray",
    "xarray.core.variable.Variable": "xarray.Variable",
    "transformers.modeling_utils.PreTrainedModel": "transformers.PreTrainedModel",
    "transformers.configuration_utils.PreTrainedConfig": "transformers.PretrainedConfig",
    "matplotlib.axes._axes.Axes": "matplotlib.axes.Axes",
    "scipy.sparse.linalg._interface.LinearOperator": "scipy.sparse.linalg.LinearOperator",
    "Axes": "matplotlib.axes.Axes",
    "Figure": "matplotlib.figure.Figure",
    **{
        name: f"collections.abc.{name}"
        for name in ("Callable", "Collection", "Iterable", "Iterator", "Mapping", "Sequence")
    },
}
"""Names as modules of the package import them, in full."""


def plain(line: str) -> str:
    """A line of text in which bars, stars, at signs and underscores at the end of words are
    characters."""
    parts = MARKUP.split(line)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\\)\|", r"\\|", parts[i])
        parts[i] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", parts[i])
        parts[i] = re.sub(r"(?<!\\)([*@])", r"\\\1", parts[i])
    return "".join(parts)


def sections(lines: list[str]) -> list[str]:
    """The lines of a docstring, its lists of results and attributes as napoleon reads them.

    What follows ``Returns:`` is a sentence, without a type before a colon. Attributes that share a
    line have one each.
    """
    found: list[str] = []
    section, inner = "", 0
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if re.fullmatch(r"\s*(Args|Returns|Yields|Raises|Attributes):", line):
            section, inner = line.strip(), len(lines[number + 1]) - len(lines[number + 1].lstrip())
            first = True
        elif line.strip() and indent < inner:
            section = ""
        elif section in ("Returns:", "Yields:") and first:
            line, first = f"{line[:indent]}: {line.lstrip()}", False
        elif (
            section == "Attributes:"
            and indent == inner
            and (shared := re.match(r"\s*(\w+(?:, \w+)+): (.*)", line))
        ):
            *others, last = shared[1].split(", ")
            found += [f"{line[:indent]}{name}: see ``{last}``." for name in others]
            line = f"{line[:indent]}{last}: {shared[2]}"
        found.append(line)
    return found


def markup(lines: list[str]) -> list[str]:
    """The lines of a docstring, formulas and code left alone."""
    found, inside = [], None
    for line in docstring("\n".join(sections(lines))).split("\n"):
        indent = len(line) - len(line.lstrip())
        if inside is not None and line.strip() and indent <= inside:
            inside = None
        if inside is None and re.match(r"\s*\.\. \w+::", line):
            inside = indent
        code = inside is not None or line.lstrip().startswith((">>>", "..."))
        if line.rstrip().endswith("::") and inside is None:
            inside = indent
        found.append(line if code else plain(line))
    return found


def process(app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Called with each docstring, whose lines it replaces."""
    if getattr(obj, "__module__", "").startswith("matplotlib"):
        lines[:] = lines[:1]  # of another project, in its own markup
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"  # a sentence, without a type before a colon
    lines[:] = markup(lines)


def role(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Any,
    options: Any = None,
    content: Any = (),
) -> tuple[list[Any], list[Any]]:
    """What stands between single backticks: a reference to an object of the package where it names
    one, code otherwise."""
    from docutils import nodes
    from sphinx.addnodes import pending_xref

    shown = nodes.literal(rawtext, text, classes=["code"])
    document = inliner.document.settings.env.docname
    return [
        pending_xref(
            rawtext,
            shown,
            refdomain="",
            reftype=ROLE,
            reftarget=text,
            refdoc=document,
            refwarn=True,
        )
    ], []


def exists(name: str) -> bool:
    """Whether a dotted name of the package can be imported."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def candidate(target: str, known: Any) -> str | None:
    """The object of the package that a name means: itself, a public name, or the one class or
    function (or dotted attribute) that ends with it."""
    public = api.public().get(target)
    for name in (target, f"lipbound.{public}", f"lipbound.{target}"):
        if name in known:
            return name
    if target.startswith("lipbound.") and exists(target):
        found = (
            importlib.import_module(target)
            if target in sys.modules
            else operator.attrgetter(target.removeprefix("lipbound."))(lipbound)
        )
        home = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
        if home in known or api.public().get(home):
            return home if home in known else f"lipbound.{api.public()[home]}"
    kinds = (
        ("class", "function", "exception", "module", "data") if "." not in target else tuple(known)
    )
    same = {name for name in known if name.endswith(f".{target}") and name.startswith("lipbound.")}
    same = {name for name in same if "." in target or known[name].objtype in kinds}
    return min(same) if len(same) == 1 else None


def resolve(
    app: "Sphinx", env: "BuildEnvironment", node: "pending_xref", contnode: "Element"
) -> "Element | None":
    """A reference that no page answers to: names in full, public names, then objects of this
    package by their last name.

    What stands between backticks and is no object of the package stays code; a name that begins
    with ``lipbound.`` must exist.
    """
    target, kind = node["reftarget"], node["reftype"]
    if kind != ROLE and node.get("refdomain") != "py":
        return None
    domain: Any = env.get_domain("py")
    best = candidate(target.removesuffix("()"), domain.objects)
    if best is not None:
        entry = domain.objects[best]
        return domain_reference(app, node, contnode, entry.docname, entry.node_id, best)
    if target in SHORT:
        from sphinx.ext.intersphinx import resolve_reference_detect_inventory

        node["refdomain"], node["reftype"], node["reftarget"] = "py", "class", SHORT[target]
        return resolve_reference_detect_inventory(env, node, contnode)
    if kind == ROLE:
        return contnode if not target.startswith("lipbound.") or exists(target) else None
    return contnode if TYPE_VARIABLE.search(target) else None


def domain_reference(
    app: "Sphinx", node: "pending_xref", contnode: "Element", docname: str, anchor: str, title: str
) -> "Element":
    """A link to an object of the package."""
    from sphinx.util.nodes import make_refnode

    return make_refnode(app.builder, node["refdoc"], docname, anchor, contnode, title)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_role(ROLE, role)
    # before napoleon, which makes lists of arguments
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("missing-reference", resolve, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
