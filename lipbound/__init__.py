"""Exact local Lipschitz constants of attention heads, beside published bounds.

The bounds are every published l2 bound on softmax heads that we know of, and our own. Public names
are imported when they are first used: ``import lipbound`` loads neither torch nor transformers.

>>> import lipbound as lb
>>> ds = lb.compare(
...     "builtin:gpt2", samples=1, max_length=16, bounds=["castin", "yudin"], progress=False
... )
>>> ds["exact"].dims
('sample', 'layer', 'head')
"""

import ast
import importlib
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [line for line in _STUB.body if isinstance(line, ast.ImportFrom)]
_HOME = {one.asname: line.module for line in _IMPORTS for one in line.names if one.asname}
"""Modules of public names: the imports that type checkers read (as in SPEC 1 of Scientific Python).
"""
__all__ = sorted(_HOME)


@contextmanager
def _importing() -> Iterator[None]:
    """Import what draws random numbers, such as rich, without using up the caller's stream."""
    drawn = random.getstate()
    try:
        with warnings.catch_warnings():
            # of the hub's client in a notebook without widgets, which none of ours needs
            warnings.filterwarnings("ignore", "IProgress not found")
            yield
    finally:
        random.setstate(drawn)


def __getattr__(name: str) -> Any:
    """Public names on first use (PEP 562), and the folders of the package."""
    home = _HOME.get(name, __name__)
    try:
        with _importing():
            if home == __name__:
                value = importlib.import_module(f"{home}.{name}")
            else:  # what ``from home import name`` does
                value = getattr(__import__(home, fromlist=[name]), name)
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module 'lipbound' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
