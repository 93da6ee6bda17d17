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

import importlib
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipbound import bounds as bounds
    from lipbound import regularizers as regularizers
    from lipbound.analysis.adversarial_inputs import attack as attack
    from lipbound.analysis.adversarial_inputs import radius_curve as radius_curve
    from lipbound.analysis.cache_bits import cache_bits as cache_bits
    from lipbound.analysis.network import network_norm as network_norm
    from lipbound.attention.layer import Attention as Attention
    from lipbound.attention.layer import cross_attention as cross_attention
    from lipbound.attention.module_attention import ModuleAttention as ModuleAttention
    from lipbound.errors import LipboundError as LipboundError
    from lipbound.errors import Notice as Notice
    from lipbound.jacobians.head import HeadJacobian as HeadJacobian
    from lipbound.jacobians.spectral_norm import spectral_norm as spectral_norm
    from lipbound.jacobians.spectrum import SingularValues as SingularValues
    from lipbound.jacobians.spectrum import condition_number as condition_number
    from lipbound.jacobians.spectrum import frobenius_norm as frobenius_norm
    from lipbound.jacobians.spectrum import singular_values as singular_values
    from lipbound.jacobians.token_norms.token_norm import TokenProfile as TokenProfile
    from lipbound.jacobians.token_norms.token_norm import token_norm as token_norm
    from lipbound.jacobians.token_norms.token_norm import token_profile as token_profile
    from lipbound.linalg.solution import Norm as Norm
    from lipbound.models.capture.capture import capture as capture
    from lipbound.models.inputs import prepare as prepare
    from lipbound.models.loading import load_checkpoint as load_checkpoint
    from lipbound.models.training import attention_layers as attention_layers
    from lipbound.models.training import attention_probabilities as attention_probabilities
    from lipbound.reporting import plots as plots
    from lipbound.reporting import tables as tables
    from lipbound.reporting.citations import cite as cite
    from lipbound.reporting.page.render import report as report
    from lipbound.runs.compare import compare as compare
    from lipbound.runs.concat import concat as concat
    from lipbound.runs.diff import diff as diff
    from lipbound.runs.monitor import Monitor as Monitor
    from lipbound.runs.store import load as load
    from lipbound.runs.store import save as save
    from lipbound.runs.sweep import sweep as sweep
    from lipbound.runs.verify import verify as verify
    from lipbound.runs.weights import weight_norms as weight_norms

__version__ = "0.1.0"
_NAMES = {
    "analysis.adversarial_inputs": "attack radius_curve",
    "analysis.cache_bits": "cache_bits",
    "analysis.network": "network_norm",
    "attention.layer": "Attention cross_attention",
    "attention.module_attention": "ModuleAttention",
    "errors": "LipboundError Notice",
    "jacobians.head": "HeadJacobian",
    "jacobians.spectral_norm": "spectral_norm",
    "jacobians.spectrum": "SingularValues condition_number frobenius_norm singular_values",
    "jacobians.token_norms.token_norm": "TokenProfile token_norm token_profile",
    "linalg.solution": "Norm",
    "models.capture.capture": "capture",
    "models.inputs": "prepare",
    "models.loading": "load_checkpoint",
    "models.training": "attention_layers attention_probabilities",
    "reporting.citations": "cite",
    "reporting.page.render": "report",
    "runs.compare": "compare",
    "runs.concat": "concat",
    "runs.diff": "diff",
    "runs.monitor": "Monitor",
    "runs.store": "load save",
    "runs.sweep": "sweep",
    "runs.verify": "verify",
    "runs.weights": "weight_norms",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}
_MODULES = {"plots": "reporting.plots", "tables": "reporting.tables"}
__all__ = sorted([*_HOME, *_MODULES, "bounds", "regularizers"])


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
    home = f"lipbound.{_HOME.get(name, _MODULES.get(name, name))}"
    try:
        with _importing():
            module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != home:
            raise
        raise AttributeError(f"module 'lipbound' has no attribute {name!r}") from None
    globals()[name] = value = getattr(module, name) if name in _HOME else module
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
