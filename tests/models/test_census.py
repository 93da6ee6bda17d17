"""The census of model types says of a few what is known of them."""

import warnings
from pathlib import Path

import pytest
from support.checks import script
from support.versions import newer_transformers

import lipbound as lb


@pytest.fixture(scope="module")
def census():
    return script(Path(__file__).parents[2] / "benchmarks" / "census.py")


@newer_transformers("configurations are no dataclasses, which the census takes them for")
@pytest.mark.parametrize(
    ("kind", "verdict", "automatic"),
    [
        *(("qwen3", "closed form", 0), ("t5", "closed form", 0), ("deepseek_v3", "closed form", 0)),
        *(("resnet", "no attention", None), ("mobilevitv2", "refused", None)),
    ],
)
def test_verdicts(census, kind, verdict, automatic):
    with census.quiet():
        row = census.verdict(kind)
    assert (row["verdict"], row.get("automatic")) == (verdict, automatic), row
    if verdict in ("closed form", "both"):
        assert row["error"] < 1e-6


@newer_transformers("configurations are no dataclasses, which the census takes them for")
@pytest.mark.parametrize(
    ("kind", "mixes"),
    [
        *(("convbert", True), ("pegasus_x", True), ("falcon_h1", True)),
        *(("bart", False), ("longt5", False), ("qwen3_moe", False), ("vit", False)),
    ],
)
def test_layers_that_mix_tokens_by_more_than_attention_say_so(census, kind, mixes):
    """By convolutions, attention within blocks and states beside it."""
    with census.quiet():
        model, inputs = census.made(kind)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lb.capture(model, inputs)
    said = " ".join(str(one.message) for one in found)
    assert ("also mix tokens by other means" in said) == mixes


def test_what_cannot_be_built_has_a_reason(census):
    with census.quiet():
        row = census.verdict("clip_text_model_with_no_such_name")
    assert row["verdict"] == "not built"
    assert row["reason"]
