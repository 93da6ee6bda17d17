"""lipbound: exact local Lipschitz constants of attention heads, beside every published upper bound.

>>> import lipbound as lb
>>> ds = lb.compare("builtin:gpt2", samples=1, max_length=16, bounds=["castin", "yudin"], progress=False)
>>> ds["exact"].dims
('sample', 'layer', 'head')
"""

from lipbound import bounds, plots, regularizers, tables
from lipbound.attention import Attention
from lipbound.balls import attack, radius_curve
from lipbound.capture import capture
from lipbound.compare import compare
from lipbound.errors import LipboundError
from lipbound.network import network_norm
from lipbound.norms import spectral_norm
from lipbound.reporting import report
from lipbound.solution import Norm
from lipbound.store import load
from lipbound.training import attention_probabilities
from lipbound.verifying import verify

__all__ = [
    "Attention", "LipboundError", "Norm", "attack", "attention_probabilities", "bounds", "capture", "compare", "load", "network_norm", "plots",
    "radius_curve", "regularizers", "report", "spectral_norm", "tables", "verify",
]  # fmt: skip
__version__ = "0.1.0"
