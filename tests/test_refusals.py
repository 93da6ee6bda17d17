"""What bounds, penalties and studies refuse: the call, and words of the one sentence."""

from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from support.checks import refused
from support.layers import changed, random_attention
from support.models import AFFINE, build

import lipbound as lb
from lipbound.analysis import adversarial_inputs, mean_field
from lipbound.analysis.length_growth import exponents, sequence_growth
from lipbound.analysis.network import blocks
from lipbound.models.training import projections
from lipbound.regularizers import ExactNorm, JaSMin, SoundPenalty, Specformer

ATT = random_attention("plain")
BIASED = random_attention("biases")
WITHOUT = random_attention("plain", w_o=False)
ONES = torch.ones(2, ATT.tokens, dtype=torch.float64)
P = torch.ones(1, 1, 2, 2)
NO_MODELS = ["bert", None, torch.ones(2)]
ROTARY = "c_attn, qkv; with rotary positions or shared keys take JaSMin"
SEES = Specformer(1, 1, 1), lambda model: lb.attention_layers(model).__enter__()
VALUES = xr.DataArray(np.ones(2), dims="length", coords={"length": [10, 12]})


def calls(call, *cases):
    """A call with each of these options, and what is said."""
    return [(partial(call, **given), said) for given, said in cases]


BOUNDS = [
    *calls(
        partial(lb.bounds.over_ball, BIASED),
        ({"radius": []}, "radius is empty"),
        ({"radius": [1, "x"]}, "radius is 'x'"),
        ({"radius": 1e200}, "at most 1e60"),
        ({"radius": 1.0, "ball": "tokens"}, "did you mean 'token'"),
        ({"radius": 1.0, "at": "kim"}, "bounds another map"),
        ({"radius": 1.0, "at": "castin"}, "is not a bound here"),
        ({"radius": 1.0, "at": "lipbound_one"}, "is stated in the one-token norm"),
    ),
    (lambda: lb.bounds.get("yudin_g1").over_ball(ATT, 1.0), "without a radius"),
    *calls(
        partial(lb.spectral_norm, ATT),
        ({"seed": [1] * 5}, "5 seeds"),
        ({"map": "heda"}, "did you mean 'head'"),
        ({"method": "lanzcos"}, "did you mean 'lanczos'"),
    ),
    (lambda: lb.radius_curve(ATT, []), "radius is empty"),
    (lambda: lb.bounds.names("every"), "unknown norm 'every'; did you mean 'every-token'"),
    (lambda: lb.bounds.evaluate(ATT, ["nothing"]), "unknown bound 'nothing'"),
    *calls(
        lambda name="yudin", **given: lb.bounds.whole_layer(ATT, name, **given),
        ({"name": "kim"}, "leave it out"),
        ({"map": "head"}, "unknown map of a whole layer 'head'"),
        ({"rule": "sums"}, "did you mean 'sum'"),
    ),
    *calls(
        partial(lb.token_norm, WITHOUT),
        ({"norm": "two-token"}, "did you mean"),
        ({"norm": "frobenius"}, "norm"),
        ({"map": "residual"}, "map"),
        ({"map": "layer"}, "w_o"),
    ),
    (lambda: changed(ATT, mask=torch.tensor(0.0)), "mask is one number"),
]
PENALTIES = [
    (lambda: JaSMin(1), "k is 1"),
    (lambda: JaSMin(0, "sum"), "unknown reduction"),
    (lambda: JaSMin()([]), "no attentions"),
    (lambda: JaSMin()(P), "give a list"),
    (lambda: JaSMin()((None, None)), "attentions is None"),
    (lambda: JaSMin()([torch.ones(2, 2)]), "has shape"),
    (lambda: JaSMin()([P], torch.ones(1, 3)), "need (1, 2)"),
    (lambda: JaSMin()([P], [1, 1]), "valid is [1, 1]"),
    (lambda: JaSMin()(3), "list"),
    (lambda: SoundPenalty("yudin"), "unknown penalty bound"),
    (lambda: SoundPenalty()([]), "no layers"),
    *calls(ExactNorm, *(({"tol": tol}, "tol is") for tol in (0, 1, "small", True))),
    (lambda: ExactNorm()([]), "no layers"),
    (lambda: ExactNorm()([torch.ones(2)]), "ExactNorm"),
    (lambda: Specformer(0, 0, 0)(build(AFFINE["bert"])), "nothing to penalise"),
    (lambda: projections(torch.nn.Linear(2, 2)), "projections called query/key/value, "),
    *((lambda f=f: f(lb.load_checkpoint("builtin:llama").model), ROTARY) for f in SEES),
    *((partial(Specformer(1, 1, 1), x), "give a loaded transformers model") for x in NO_MODELS),
    *((partial(SoundPenalty(), x), "attention_layers") for x in NO_MODELS),
]
STUDIES = [
    (lambda: adversarial_inputs.adversarial_inputs(ATT, 0, 1.0), "at least one token"),
    (lambda: adversarial_inputs.adversarial_inputs(ATT, 3, 0.0), "positive radius"),
    (lambda: mean_field.weighted_norm(ATT, ONES), "add up to one"),
    (lambda: mean_field.weighted_norm(ATT, ONES[:1]), "must be (samples, N)"),
    (lambda: mean_field.weighted_norm(ATT, -ONES / 6), "positive"),
    (lambda: mean_field.weighted_norm(random_attention("padded"), ONES / 6), "without padding"),
    (lambda: blocks(torch.nn.Linear(2, 2)), "no list of blocks"),
    (lambda: exponents(VALUES), "at least three lengths"),
    (lambda: exponents(VALUES.rename(length="sample")), "has no 'length'; give what lipbound.anal"),
    *calls(
        partial(sequence_growth, "builtin:gpt2"),
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (0,)}, "length is 0; it must be a whole number, at least 1"),
        ({"lengths": (2.5,)}, "length is 2.5"),
        ({"lengths": (2,), "sequences": "3"}, "sequences is '3'"),
        ({"lengths": (64,), "sequences": 10_000}, "of 640000"),
        ({"lengths": (10_000,)}, "positions"),
    ),
    (lambda: sequence_growth("builtin:vit", lengths=(4,)), "not text"),
    *calls(
        partial(lb.cache_bits, "builtin:gpt2"),
        ({"error": 0}, "error is 0"),
        ({"keys": "tensor"}, "unknown keys 'tensor'"),
        ({"bits": [0]}, "bits is 0"),
        ({"bits": []}, "bits is empty"),
        ({"bits": 0}, "bits is 0"),
    ),
]


@pytest.mark.parametrize(("call", "words"), BOUNDS + PENALTIES + STUDIES)
def test_what_is_wrong_is_refused_in_one_sentence(call, words):
    refused(call, words)


@pytest.mark.parametrize(
    ("call", "norm"),
    [
        (lambda: lb.bounds.evaluate(ATT, ["yudin", "lipbound_one"]), "one-token"),
        (lambda: lb.bounds.resolve("lipbound_one, lipbound_every"), "every-token"),
        (lambda: lb.bounds.resolve(["lipbound_one"], "frobenius"), "one-token"),
        (lambda: lb.bounds.resolve("yudin", "every-token"), "frobenius"),
    ],
)
def test_bounds_of_several_norms_are_refused(call, norm):
    refused(call, f"is stated in the {norm} norm and ", "are not compared; take some of ")
