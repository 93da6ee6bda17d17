"""Fixtures of every folder."""

import pytest
import torch
from support.layers import KINDS, random_attention

from lipbound.attention.layer import Attention

torch.set_num_threads(1)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of small layer."""
    return request.param


@pytest.fixture
def att(kind: str) -> Attention:
    """A float64 layer of every kind."""
    return random_attention(kind)
