"""Models and inputs of other makes: measured, or refused in one sentence that says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from support.models import LLAMA, build
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import lipbound as lb
from lipbound.errors import CaptureError, CheckpointError, Notice
from lipbound.regularizers import JaSMin

X = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(0))


class Attending(nn.Module):
    """Two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, [2, 8]).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


TRACED = {
    "trace": lambda module: torch.jit.trace(module, X),
    "script": torch.jit.script,
    "export": lambda module: torch.export.export(module, (X,)),
    "module of export": lambda module: torch.export.export(module, (X,)).module(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", TRACED.values(), ids=TRACED)
def test_traced_programs_are_refused(made: Callable[[nn.Module], Any]) -> None:
    program = made(Attending().eval())
    for measured in (lb.capture, lb.compare):
        with pytest.raises(CaptureError, match=r"a traced program .*give the module that it was"):
            measured(program, X if measured is lb.capture else {"x": X})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_part_of_a_model_is_named() -> None:
    plain = Attending().eval()
    model = nn.Sequential(plain, torch.jit.trace(plain, X))
    with pytest.warns(Notice, match=r"left out, in 1 module: 1 \(TopLevelTracedModule\) of Seq"):
        assert len(lb.capture(model, X)) == 1
    lb.capture(torch.fx.symbolic_trace(plain), X)  # runs as it is written


def test_weights_that_are_made_of_other_tensors_are_refused() -> None:
    """As frozen ones of quanto, and those of torchao."""
    module = Attending()
    module.q.weight = nn.Parameter(TwoTensor(torch.ones(16, 16), torch.ones(16, 16)))
    for measured in (lb.capture, lb.compare):
        with pytest.raises(CheckpointError, match=r"q\.weight is quantized, and has no true deriv"):
            measured(module, X if measured is lb.capture else {"x": X})


def test_probabilities_that_are_not_seen_are_refused() -> None:
    config = tf.BloomConfig(vocab_size=60, hidden_size=24, n_layer=2, n_head=4)
    model = build(lambda: tf.BloomModel(config))
    with (
        pytest.raises(CaptureError, match=r"BloomModel ran, and none .*output_attentions=True"),
        lb.attention_probabilities(model),
    ):
        model(IDS)
    model.set_attn_implementation("eager")  # what the sentence says to do
    model.requires_grad_().zero_grad()
    JaSMin()(model(IDS, output_attentions=True).attentions).backward()
    assert bool((model.h[0].self_attention.query_key_value.weight.grad != 0).any())


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_positions_of_several_axes_go_with_their_samples(samples: int) -> None:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    config = tf.Qwen2VLTextConfig(**LLAMA, rope_parameters=rope, pad_token_id=0)
    model = build(lambda: tf.AutoModel.from_config(config))
    positions = torch.arange(7).repeat(3, samples, 1)
    positions[:, 1:2] += 3
    positions[1, 2:3] *= 2
    batch = {"input_ids": IDS[:samples], "position_ids": positions}
    ds = lb.compare(model, batch, bounds=[], tol=1e-6, progress=False)
    for sample in range(samples):
        one = {"input_ids": IDS[[sample]], "position_ids": positions[:, [sample]]}
        alone = [lb.spectral_norm(att, tol=1e-6).lower[0] for att in lb.capture(model, one)]
        mine = torch.tensor(ds.exact[sample].values)
        torch.testing.assert_close(mine, torch.stack(alone).to(mine), rtol=1e-5, atol=0)
