"""What studies refuse: the call, and words of the one sentence."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from support.commands import refused
from support.layers import random_attention

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.analysis.length_growth import exponents, sequence_growth
from lipbound.analysis.network import blocks

PLAIN = random_attention("plain")
ONES = torch.ones(2, PLAIN.tokens, dtype=torch.float64)
VALUES = xr.DataArray(np.ones(2), dims="length", coords={"length": [10, 12]})
Calls = list[tuple[Callable[[], Any], str]]
CALLS: Calls = [
    (lambda: adversarial_inputs.adversarial_inputs(PLAIN, 0, 1.0), "at least one token"),
    (lambda: adversarial_inputs.adversarial_inputs(PLAIN, 3, 0.0), "positive radius"),
    (lambda: mean_field.weighted_norm(PLAIN, ONES), "add up to one"),
    (lambda: mean_field.weighted_norm(PLAIN, ONES[:1]), "must be (samples, N)"),
    (lambda: mean_field.weighted_norm(PLAIN, -ONES / 6), "positive"),
    (lambda: mean_field.weighted_norm(random_attention("padded"), ONES / 6), "without padding"),
    (lambda: blocks(torch.nn.Linear(2, 2)), "no list of blocks"),
    (lambda: exponents(VALUES), "at least three lengths"),
    (lambda: exponents(VALUES.rename(length="sample")), "has no 'length'; give what lipbound.anal"),
]
GROWTH: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"lengths": ()}, "lengths is empty"),
    ("gpt2", {"lengths": (0,)}, "length is 0; it must be a whole number, at least 1"),
    ("gpt2", {"lengths": (2.5,)}, "length is 2.5"),
    ("gpt2", {"lengths": (2,), "sequences": "3"}, "sequences is '3'"),
    ("gpt2", {"lengths": (64,), "sequences": 10_000}, "of 640000"),
    ("gpt2", {"lengths": (10_000,)}, "positions"),
    ("vit", {"lengths": (4,)}, "not text"),
]
BITS: list[tuple[dict[str, Any], str]] = [
    ({"error": 0}, "error is 0"),
    ({"keys": "tensor"}, "unknown keys 'tensor'"),
    ({"bits": [0]}, "bits is 0"),
    ({"bits": []}, "bits is empty"),
    ({"bits": 0}, "bits is 0"),
]


def calls() -> Iterator[tuple[Callable[[], Any], str]]:
    yield from CALLS
    for name, how, words in GROWTH:
        yield lambda name=name, how=how: sequence_growth(f"builtin:{name}", **how), words
    for how, words in BITS:
        yield lambda how=how: lb.cache_bits("builtin:gpt2", **how), words


@pytest.mark.parametrize(("call", "words"), list(calls()))
def test_studies(call: Callable[[], Any], words: str) -> None:
    refused(call, words)
