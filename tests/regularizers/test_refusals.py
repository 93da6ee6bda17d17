"""What penalties refuse: the call, and words of the one sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.commands import refused
from support.models import AFFINE, build

from lipbound.models.training import projections
from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer

P = torch.ones(1, 1, 2, 2)
NO_MODELS: list[Any] = ["bert", None, torch.ones(2)]
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: JaSMin(1), "k is 1"),
    (lambda: JaSMin(0, "sum"), "unknown reduction"),
    (lambda: JaSMin()([]), "no attentions"),
    (lambda: JaSMin()(P), "give a list"),  # type: ignore[arg-type]
    (lambda: JaSMin()((None, None)), "attentions is None"),  # type: ignore[arg-type]
    (lambda: JaSMin()([torch.ones(2, 2)]), "has shape"),
    (lambda: JaSMin()([P], torch.ones(1, 3)), "need (1, 2)"),
    (lambda: JaSMin()([P], [1, 1]), "valid is [1, 1]"),  # type: ignore[arg-type]
    (lambda: JaSMin()(3), "list"),  # type: ignore[arg-type]
    (lambda: SoundPenalty("yudin"), "unknown penalty bound"),
    (lambda: SoundPenalty()([]), "no layers"),
    *((lambda tol=tol: ExactNorm(tol), "tol is") for tol in (0, 1, "small", True)),
    (lambda: ExactNorm()([]), "no layers"),
    (lambda: ExactNorm()([torch.ones(2)]), "ExactNorm"),  # type: ignore[list-item]
    (lambda: Specformer(0, 0, 0)(build(AFFINE["bert"])), "nothing to penalise"),
    (lambda: projections(torch.nn.Linear(2, 2)), "projections called query/key/value, "),
    *((lambda x=x: Specformer(1, 1, 1)(x), "give a loaded transformers model") for x in NO_MODELS),
    *((lambda x=x: SoundPenalty()(x), "attention_layers") for x in NO_MODELS),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_penalties(call: Callable[[], Any], words: str) -> None:
    refused(call, words)
