"""The registry: what it takes, what it refuses, what it imports, and that nothing in it depends on
what ran before."""

import subprocess
import sys

import pytest
import torch
from support.layers import HARD, random_attention
from support.variants import layer as variant_layer
from torch import Tensor

from lipbound import bounds
from lipbound.attention.layer import Attention
from lipbound.bounds import registry
from lipbound.errors import AttentionError

TEXTS = {
    "label": "l",
    "citation": "doe2027",
    "statement": "s",
    "statement_latex": "$s$",
    "source": "s",
    "assumptions": "a",
    "cost": "c",
}


def always(att: Attention) -> Tensor:
    return torch.ones(1, 1, dtype=torch.bool)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of which nothing is kept."""
    bounds.names()
    monkeypatch.setattr(registry, "_BOUNDS", dict(registry._BOUNDS))
    monkeypatch.setattr(registry, "_BIBTEX", dict(registry._BIBTEX))


@pytest.mark.usefixtures("scratch")
def test_each_kind_of_head_has_its_formula() -> None:
    @bounds.bound("doe", **TEXTS, condition=always, bibtex="@misc{doe2027}")
    def doe(att: Attention) -> Tensor:
        """The statement."""
        return torch.ones(1, 1)

    @doe.extends(
        "rotation",
        "cap",
        condition=lambda att: ~always(att),
        terms=lambda bound, att: {"values": bound(att)},
    )
    def _(att: Attention) -> Tensor:
        return torch.full((1, 1), 2.0)

    plain, turned, sink = (
        random_attention("plain"),
        variant_layer(0, frozenset({"rotation"})),
        variant_layer(0, frozenset({"rotation", "sinks"})),
    )
    assert doe is bounds.get("doe")
    assert doe.__doc__ == "The statement."
    assert bounds.names()[-1] == "doe"
    assert registry.bibliography()["doe2027"] == "@misc{doe2027}"
    assert doe.covers == {"rotation", "cap"}
    assert doe(plain).unique().tolist() == [pytest.approx(1.0, rel=1e-11)]
    assert doe(turned).unique().tolist() == [pytest.approx(2.0, rel=1e-11)]
    assert (doe(turned).dtype, doe(turned).shape) == (torch.float64, (2, 3))
    assert [bool(doe.sound(att).all()) for att in (plain, turned)] == [True, False]
    assert doe.terms(plain) is None
    assert set(doe.terms(turned)) == {"values"}
    assert not doe.applies(sink)
    assert doe.terms(sink) is None
    for call in (lambda: doe(sink), lambda: bounds.whole_layer(sink, "doe", map="heads")):
        with pytest.raises(AttentionError, match="bound 'doe' does not cover sink logits"):
            call()
    with pytest.raises(ValueError, match="must cover more than"):
        doe.extends("cap", condition=always)(always)


@pytest.mark.usefixtures("scratch")
def test_a_layers_own_bound_is_its_best() -> None:
    @bounds.bound(
        "doe",
        **TEXTS,
        condition=always,
        layer=lambda bound, att, map: torch.zeros(att.samples, dtype=torch.float64),
    )
    def doe(att: Attention) -> Tensor:
        return torch.ones(1, 1)

    att = random_attention("plain")
    assert bounds.whole_layer(att, "doe", map="heads").tolist() == [0.0, 0.0]
    assert bounds.whole_layer(att, "doe", map="heads", rule="sum").tolist() == pytest.approx(
        [3.0, 3.0]
    )


@pytest.mark.usefixtures("scratch")
def test_a_citation_key_has_one_entry() -> None:
    with pytest.raises(ValueError, match="'yudin2025pay' is already that of another entry"):
        bounds.bound(
            "doe", **TEXTS | {"citation": "yudin2025pay"}, condition=always, bibtex="@misc{other}"
        )(always)


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_block_bound_does_not_depend_on_what_ran_before(kind: str, dtype: torch.dtype) -> None:
    """The same digits alone, after `lipbound`, and before it."""
    alone, after = random_attention(kind, dtype=dtype), random_attention(kind, dtype=dtype)
    ours, block = bounds.get("lipbound"), bounds.get("lipbound_block")
    first, value = ours(after), block(after)
    assert torch.equal(block(alone), value)
    assert torch.equal(ours(alone), first)
    for map in ("heads", "layer"):
        layers = [random_attention(kind, dtype=dtype) for _ in range(2)]
        bounds.whole_layer(layers[1], "lipbound", map=map)
        alone, after = (bounds.whole_layer(layer, "lipbound_block", map=map) for layer in layers)
        assert torch.equal(alone, after)


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_registry_is_imported_without_torch() -> None:
    code = """
import sys, lipbound.bounds.registry, lipbound.bounds.audit
print("torch" in sys.modules)
lipbound.bounds.names()
print("torch" in sys.modules)
"""
    assert _run(code).split() == ["False", "True"]


@pytest.mark.slow
def test_public_names_are_functions_whatever_was_imported_first() -> None:
    code = """
import lipbound.bounds.audit, lipbound.bounds.whole_layer_rules, lipbound.bounds.papers.specformer2024
from lipbound import bounds
print(bounds.audit.__name__, bounds.whole_layer.__name__, bounds.over_ball.__name__, sorted(bounds.__all__) == dir(bounds), *bounds.names())
"""  # noqa: E501
    assert _run(code).split() == ["audit", "whole_layer", "over_ball", "True", *bounds.names()]


@pytest.mark.slow
def test_names_of_papers_are_taken_before_they_are_imported() -> None:
    code = """
from lipbound import bounds
texts = dict.fromkeys(("label", "citation", "statement", "statement_latex", "source", "assumptions", "cost"), "")
try:
    bounds.bound("yudin", **texts, condition=len)(len)
except ValueError as error:
    print(error)
"""  # noqa: E501
    assert _run(code) == "a bound named 'yudin' is already registered"
