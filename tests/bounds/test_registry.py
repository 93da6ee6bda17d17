"""The registry: what it takes, what it refuses and in which words, and that nothing in it depends
on what ran before."""

import pytest
import torch
from support.checks import refused
from support.layers import HARD, random_attention
from support.variants import layer as variant_layer

import lipbound as lb
from lipbound.bounds import registry
from lipbound.errors import AttentionError, UnknownNameError

TEXTS = "label citation statement_latex source assumptions cost"
TEXTS = dict.fromkeys(TEXTS.split(), "doe2027")
ATT = random_attention("plain")


def always(att):
    return torch.ones(1, 1, dtype=torch.bool)


@pytest.fixture
def scratch(monkeypatch):
    """A registry of which nothing is kept."""
    lb.bounds.names()
    monkeypatch.setattr(registry, "_BOUNDS", dict(registry._BOUNDS))
    monkeypatch.setattr(registry, "_BIBTEX", dict(registry._BIBTEX))


@pytest.mark.usefixtures("scratch")
def test_each_kind_of_head_has_its_formula():
    @lb.bounds.bound("doe", **TEXTS, condition=always, bibtex="@misc{doe2027}")
    def doe(att):
        """The statement."""
        return torch.ones(1, 1)

    def terms(bound, att):
        return {"values": bound(att)}

    @doe.extends("rotation", "cap", condition=lambda att: ~always(att), terms=terms)
    def _(att):
        return torch.full((1, 1), 2.0)

    turned, sink = (variant_layer(0, frozenset(has)) for has in ({"rotation"}, {"sinks"}))
    assert doe is lb.bounds.get("doe")
    assert doe.__doc__ == "The statement."
    assert lb.bounds.names()[-1] == "doe"
    assert registry.bibliography()["doe2027"] == "@misc{doe2027}"
    assert doe.covers == {"rotation", "cap"}
    assert doe(ATT).unique().tolist() == [pytest.approx(1.0, rel=1e-11)]
    assert doe(turned).unique().tolist() == [pytest.approx(2.0, rel=1e-11)]
    assert (doe(turned).dtype, doe(turned).shape) == (torch.float64, (2, 3))
    assert [bool(doe.sound(att).all()) for att in (ATT, turned)] == [True, False]
    assert doe.terms(ATT) is None
    assert set(doe.terms(turned)) == {"values"}
    assert not doe.applies(sink)
    assert doe.terms(sink) is None
    for call in (lambda: doe(sink), lambda: lb.bounds.whole_layer(sink, "doe", map="heads")):
        refused(call, "bound 'doe' does not cover sink logits", error=AttentionError)
    with pytest.raises(ValueError, match="must cover more than"):
        doe.extends("cap", condition=always)(always)


@pytest.mark.usefixtures("scratch")
def test_a_layers_own_bound_is_its_best():
    zeros = torch.zeros(2, dtype=torch.float64)
    make = lb.bounds.bound("doe", **TEXTS, condition=always, layer=lambda bound, att, map: zeros)
    make(lambda att: torch.ones(1, 1))
    assert lb.bounds.whole_layer(ATT, "doe", map="heads").tolist() == [0.0, 0.0]
    summed = lb.bounds.whole_layer(ATT, "doe", map="heads", rule="sum")
    assert summed.tolist() == pytest.approx([3.0, 3.0])


@pytest.mark.usefixtures("scratch")
def test_names_and_citation_keys_are_taken_once():
    other = TEXTS | {"citation": "yudin2025pay", "bibtex": "@misc{other}"}
    for name, texts, words in (
        ("doe", other, "'yudin2025pay' is already that of another entry"),
        ("yudin", TEXTS, "already registered"),
    ):
        with pytest.raises(ValueError, match=words):
            lb.bounds.bound(name, **texts, condition=always)(always)
    refused(lambda: lb.bounds.get("yudin_g2"), "did you mean 'yudin_g1'", error=UnknownNameError)


@pytest.mark.each_value(kind=HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_block_bound_does_not_depend_on_what_ran_before(kind, dtype):
    """The same digits alone, after `lipbound`, and before it."""
    alone, after = random_attention(kind, dtype=dtype), random_attention(kind, dtype=dtype)
    ours, block = lb.bounds.get("lipbound"), lb.bounds.get("lipbound_block")
    first, value = ours(after), block(after)
    assert torch.equal(block(alone), value)
    assert torch.equal(ours(alone), first)
    for map in ("heads", "layer"):
        layers = [random_attention(kind, dtype=dtype) for _ in range(2)]
        lb.bounds.whole_layer(layers[1], "lipbound", map=map)
        alone, after = (lb.bounds.whole_layer(layer, "lipbound_block", map=map) for layer in layers)
        assert torch.equal(alone, after)


def test_norms_do_not_mix():
    tokens = [*lb.bounds.names("every-token"), *lb.bounds.names("one-token")]
    assert lb.bounds.names(None) == [*lb.bounds.names(), *tokens]
    assert lb.bounds.resolve("all") == lb.bounds.names() == lb.bounds.resolve("all", "frobenius")
    assert list(lb.bounds.evaluate(ATT, "default", "one-token")) == lb.bounds.names("one-token")
    assert list(lb.bounds.evaluate(ATT, "lipbound_one")) == ["lipbound_one"]
    for name in lb.bounds.names(None):
        assert lb.bounds.get(name).facts()["norm"] == lb.bounds.get(name).norm
    assert "every token moves by at most 1" in lb.bounds.get("lipbound_every")._repr_html_()
