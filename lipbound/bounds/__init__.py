"""Upper bounds on local Lipschitz constants of attention heads: one file per paper, one registry.

What needs torch is imported on first use; what the bounds are called and `audit` need none.
"""

import importlib
from typing import TYPE_CHECKING, Any

# here, so that importing the module of that name does not replace the function
from lipbound.bounds.audit import audit as audit
from lipbound.bounds.registry import bibliography
from lipbound.bounds.registry import bound as bound
from lipbound.bounds.registry import evaluate as evaluate
from lipbound.bounds.registry import get as get
from lipbound.bounds.registry import names as names
from lipbound.bounds.registry import resolve as resolve
from lipbound.bounds.statement import Bound as Bound

if TYPE_CHECKING:
    from lipbound.bounds.ball import over_ball as over_ball
    from lipbound.bounds.whole_layer_rules import whole_layer as whole_layer

    BIBTEX: dict[str, str]

_HOME = {"over_ball": "ball", "whole_layer": "whole_layer_rules"}
_HERE = ("BIBTEX", "Bound", "audit", "bound", "evaluate", "get", "names", "resolve")
__all__ = sorted([*_HERE, *_HOME])


def __getattr__(name: str) -> Any:
    """Import public names on first use (PEP 562).

    Raises:
        AttributeError: another name.
    """
    if name == "BIBTEX":
        value: Any = bibliography()
    elif name in _HOME:
        value = getattr(importlib.import_module(f"lipbound.bounds.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'lipbound.bounds' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
