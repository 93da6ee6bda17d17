"""What the maps of single tokens do to vectors: rotations without matrices, other maps
with them."""

import pytest
import torch
from support.checks import close, normal
from support.variants import layer

from lipbound.jacobians.token_tangents import Tangents

KINDS = {"all turned": ("rotation", 3), "some turned": ("rotation", 2), "plain": ("", 0)}
KINDS |= {has: (has, 3) for has in ("norm", "rotation norm", "together")}


@pytest.mark.parametrize("tokens", [slice(1, 4), torch.tensor([4, 0, 2])])
@pytest.mark.parametrize("kind", KINDS)
def test_maps_of_vectors_are_those_of_the_matrices(kind: str, tokens: slice | torch.Tensor) -> None:
    has, turned = KINDS[kind]
    tangents, d = Tangents(layer(3, frozenset(has.split()), d=6, turned=turned, samples=1), 0, 0), 6
    maps = tangents._passages["k"].matrices(0, tokens, d)
    maps = torch.eye(d, dtype=torch.float64)[None] if maps is None else maps
    draw = normal(1)
    y, z = (draw(len(maps), 4, width) for width in (d, maps.shape[1]))
    close(tangents.turned("k", y, tokens), y @ maps.mT, 1e-7, 1e-7)
    close(tangents.returned("k", z, tokens), z @ maps, 1e-7, 1e-7)
    longest, sizes = tangents.longest("k", tokens), maps.abs()
    assert bool((longest >= torch.linalg.matrix_norm(sizes, 2) * (1 - 1e-14)).all())
    close(longest, (sizes.sum(-1).amax(-1) * sizes.sum(-2).amax(-1)).sqrt(), 1e-7)
