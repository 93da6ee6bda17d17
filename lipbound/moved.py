"""The module paths of earlier versions, for one more release: importing one warns and leads to its new place.

Names on `lipbound` itself, and on ``lb.bounds``, ``lb.plots``, ``lb.tables`` and ``lb.regularizers``, have not changed and do not come here.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

MOVED = {
    "aggregating": "reporting.reductions",
    "balls": "analysis.adversary",
    "block": "jacobians.residual_block jacobians.maps",
    "bounds.around": "bounds.ball.plain",
    "bounds.auditing": "bounds.audit",
    "bounds.ball_variants": "bounds.ball.variants",
    "bounds.citations": "bounds",
    "bounds.interval": "bounds.ball.softmax_interval",
    "bounds.moments": "linalg.covariance",
    "bounds.normalised": "bounds.after_layer_norm",
    "bounds.ours": "bounds.lipbound2026.plain bounds.lipbound2026.parts",
    "bounds.ours_gram": "bounds.lipbound2026.gram",
    "bounds.ours_variants": "bounds.lipbound2026.variants",
    "bounds.quantities": "bounds.ingredients",
    "bounds.shares": "bounds.terms",
    "bylayer": "models.offload_loading",
    "certificates": "linalg.certificates",
    "checkpoints": "models.checkpoints models.checkpoint models.quiet models.sources.builtins models.sources.folder models.sources.weight_checks",
    "checksums": "runs.provenance",
    "citing": "reporting.citations",
    "dataset": "runs.dataset runs.provenance",
    "deterministic": "linalg.deterministic",
    "extremes": "analysis.adversarial_inputs",
    "gram": "jacobians.gram linalg.matrix_norms",
    "gram_variants": "jacobians.gram_variants",
    "growth": "analysis.length_growth",
    "inputs": (
        "models.inputs models.batch models.readers.text models.readers.positions models.readers.token_stream models.readers.images "
        "models.readers.files"
    ),
    "l2": "jacobians.l2_attention",
    "lanczos": "linalg.lanczos linalg.golub_kahan linalg.stopping",
    "layer": "jacobians.multihead",
    "meanfield": "analysis.mean_field",
    "measuring": "runs.measure runs.execute",
    "memory": "devices",
    "network": "analysis.network linalg.operators",
    "normalisation": "attention.layer_norm attention.residual models.capture.residual_detection",
    "norms": "jacobians.spectral_norm linalg.operator_norm jacobians.maps jacobians.rounding",
    "operators": "jacobians.head linalg.operators",
    "oracle": "attention.reference",
    "passage": "attention.variants.token_maps attention.variants.qk_norm",
    "positions": "models.capture.rotary_fit",
    "probing": "models.capture.probing models.capture.norm_stub models.capture.probed_layer models.capture.recorder",
    "projections": "models.capture.parameters",
    "recipes.castin": "analysis.recipes.castin2024",
    "recipes.ours": "analysis.recipes.lipbound2026",
    "recipes.registry": "analysis.recipes.registry",
    "recipes.yudin": "analysis.recipes.yudin2025",
    "recording": "models.capture.recorder",
    "reporting.contents": "reporting.page.contents",
    "reporting.details": "reporting.page.details",
    "rerun": "runs.replay",
    "residence": "models.offload",
    "robustness": "analysis.robustness",
    "rotation": "attention.variants.rotary",
    "simple": "linalg.reference_solvers",
    "softmax": "attention.softmax",
    "solution": "linalg.solution",
    "splitting": "analysis.mass_splitting",
    "store": "runs.store",
    "stored": "models.weight_files",
    "streaming": "jacobians.head_streaming",
    "styles": "reporting.styles",
    "surroundings": "models.capture.residual_detection",
    "sweep": "runs.sweep",
    "tangents": "jacobians.token_tangents",
    "training": "models.capture.differentiable",
    "unfinished": "runs.partial_store",
    "validation": "attention.validation attention.masking",
    "verifying": "runs.verify",
    "writing": "formatting",
}
"""Old module -> new ones, under ``lipbound``."""
RENAMED = {
    "aggregating.name_of": "reduction_name",
    "block.check": "check_block",
    "bounds.around.Around": "BallCentre",
    "bounds.ball_variants.CHUNK": "BALL_CHUNK",
    "bounds.ball_variants.VariantAround": "VariantBallCentre",
    "bounds.ours.Parts": "BlockNorms",
    "bylayer.load": "load_offloaded",
    "checkpoints.load": "load_checkpoint",
    "checksums.NAME": "CHECKSUM",
    "citing.FORMATS": "CITATION_FORMATS",
    "lanczos.DENSE": "LARGEST_DENSE_SVD",
    "measuring.Job": "MeasurementSpec",
    "measuring.Looked": "LayerInfo",
    "measuring.Measured": "LayerResult",
    "measuring.Recipe": "WorkerSpec",
    "normalisation.Surroundings": "ResidualContext",
    "passage.Passage": "TokenMap",
    "positions.AGREES": "ROTATION_TOLERANCE",
    "probing.AFFINE": "CAPTURE_TOLERANCE",
    "recording.NAME": "RECORDING_ATTENTION",
    "rerun.Rerun": "Replay",
    "rerun.again": "replay",
    "rerun.measure": "measure_again",
    "residence.Keeper": "WeightOffloader",
    "splitting.Split": "SplitSearch",
    "stored.Stored": "TensorRef",
    "styles.COLUMNS": "TUEPLOTS_COLUMNS",
    "surroundings.AGREES": "RESIDUAL_TOLERANCE",
    "sweep.plan": "planned_runs",
    "training.AFFINE": "TRAINING_TOLERANCE",
    "training.NAME": "TRAINING_ATTENTION",
    "unfinished.Unfinished": "PartialRun",
    "unfinished.partial": "partial_path",
    "writing.latex": "escape_latex",
    "writing.markdown": "escape_markdown",
}
"""Names that changed with their modules."""
ALIASES = {"plots": "reporting.plots", "recipes": "analysis.recipes", "tables": "reporting.tables"}
"""Old paths that are the new modules themselves: public names, and a folder."""
FOLDERS = {
    "attention.Attention": "attention.layer",
    "attention.VARIANTS": "attention.variants",
    "attention.cap_slope": "attention.variants.cap",
    "attention.projected": "attention.projections",
    "bounds.ball.CERTIFIED_DELTA": "bounds.ball.bound_over_ball",
    "bounds.ball.CERTIFIED_TOL": "bounds.ball.bound_over_ball",
    "bounds.ball.over_ball": "bounds.ball.bound_over_ball",
    "linalg.SMALLEST": "linalg.matrix_norms",
    "linalg.UNIT": "linalg.matrix_norms",
    "linalg.block_norm": "linalg.matrix_norms",
    "linalg.matrix_norm": "linalg.matrix_norms",
    "linalg.nonnegative_norm": "linalg.matrix_norms",
    "linalg.product_norm": "linalg.matrix_norms",
    "linalg.reproducible_float32": "linalg.matrix_norms",
    "linalg.symmetric_norm": "linalg.matrix_norms",
    "reporting.report": "reporting.page.render",
}
"""Names of old modules whose paths are folders now -> where they are; `from_folder` looks them up."""
FUNCTIONS = {"compare": "runs.compare", "capture": "models.capture.capture"}
"""Old module paths that are functions of `lipbound` now, which an import would replace by a module."""


class _Moved(types.ModuleType):
    """Stands for an old module; its names come from the new ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.removeprefix("lipbound.")
        wanted = RENAMED.get(f"{old}.{name}", name)
        for place in MOVED[old].split():
            module = importlib.import_module(f"lipbound.{place}")
            if hasattr(module, wanted):
                return getattr(module, wanted)
        raise AttributeError(f"{self.__name__} has no {name!r} any more; its contents are in {_places(old)}")


def _places(old: str) -> str:
    return ", ".join(f"lipbound.{place}" for place in MOVED.get(old, ALIASES.get(old, "")).split())


def from_folder(folder: str, name: str) -> Any:
    """What a module had under this name before a folder took its path; AttributeError where it had nothing such."""
    place = FOLDERS.get(f"{folder.removeprefix('lipbound.')}.{name}")
    if place is None:
        raise AttributeError(f"module {folder!r} has no attribute {name!r}")
    message = f"{folder}.{name} has moved to lipbound.{place}.{name}; the old path will go with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(f"lipbound.{place}"), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds old module paths."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        old = name.removeprefix("lipbound.")
        if old == name:
            return None
        if old in FUNCTIONS:
            raise ModuleNotFoundError(f"{name} is a function, lb.{old}, and no module any more; the module is lipbound.{FUNCTIONS[old]}", name=name)
        if old not in MOVED and old not in ALIASES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=old == "recipes")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Moved(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        old = name.removeprefix("lipbound.")
        if old in ALIASES:
            sys.modules[name] = importlib.import_module(f"lipbound.{ALIASES[old]}")
        warnings.warn(f"{name} has moved to {_places(old)}; the old path will go with the next release", DeprecationWarning, stacklevel=2)


def install() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: a checkout may still have an old folder, empty but for byte code
