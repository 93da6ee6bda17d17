"""Public names and where they are from: for type checkers, and for `lipbound.__getattr__`."""

from contextlib import AbstractContextManager
from typing import Any

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
from lipbound.reporting.page.render import report as report
from lipbound.reporting.tables import cite as cite
from lipbound.runs.compare import compare as compare
from lipbound.runs.compare import weight_norms as weight_norms
from lipbound.runs.concat import concat as concat
from lipbound.runs.diff import diff as diff
from lipbound.runs.monitor import Monitor as Monitor
from lipbound.runs.store import load as load
from lipbound.runs.store import save as save
from lipbound.runs.sweep import sweep as sweep
from lipbound.runs.verify import verify as verify

__version__: str
__all__: list[str]

def _importing() -> AbstractContextManager[None]: ...
def __getattr__(name: str) -> Any: ...
