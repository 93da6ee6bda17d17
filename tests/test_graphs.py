"""Work that is launched as a graph, on buffers that are kept: where no GPU replays it, it is done
again on these."""

import math
from functools import partial

import pytest
import torch
from support.layers import HARD, random_attention
from support.variants import VARIANTS, layer

import lipbound as lb
from lipbound import graphs
from lipbound.graphs import KEPT, graphed
from lipbound.jacobians.products.matrices import InParts

CUDA = torch.cuda.is_available()
HERE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def _replayed(monkeypatch):
    graphs.forget()
    if not CUDA:
        monkeypatch.setattr(graphs, "_on_gpu", lambda _: True)
        monkeypatch.setattr(graphs, "_captured", lambda work, _: work)
        monkeypatch.setattr(graphs, "_memory", lambda _: math.inf)


def test_graphs_take_a_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(graphs, "_memory", lambda _: 64 * 24.0)
    for n in (3, 2, 1, 7):  # of which two vectors of so many numbers are kept
        out = torch.zeros(n, device=HERE)
        launch, (changed, _) = graphed(double_into, out, {"read": out + 1})
        launch()
        assert changed.tolist() == [2] * n
        sizes = [one.tensors[0].numel() for one in graphs._GRAPHS.known.values()]
        assert sizes == {3: [3], 2: [2], 1: [2, 1], 7: []}[n]


def double_into(out, of):
    """Work with one argument that it changes, and one that has more than it reads."""
    out.add_(2 * of["read"])


def test_arguments_that_differ_in_numbers_alone_have_one_graph():
    def numbers(*values):
        return [torch.full((3,), value, device=HERE) for value in values]

    kept = []
    for k in range(1, 4):
        out, read, other = numbers(k, 10 * k, -1)
        launch, (changed, of) = graphed(double_into, out, {"read": read, "other": other})
        for times in (1, 2):
            launch()
            assert changed.tolist() == [k + times * 20 * k] * 3
        assert out.tolist() == [k] * 3  # what was given stays as it is
        assert of["other"].device.type == "meta"  # what is not read takes no memory
        kept.append(changed)
    assert all(t is kept[0] for t in kept)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # products of other digits
    try:
        assert graphed(double_into, out, {"read": read, "other": other})[1][0] is not kept[0]
    finally:
        torch.set_float32_matmul_precision(precision)
    # other shapes, kinds, or more than one tensor in the same place are other work
    out, read = numbers(0, 1)
    for args in (
        (out[:2], {"read": read[:2]}),
        (out.double(), {"read": read}),
        (out, {"read": out}),
        *((out.new_zeros(n), {"read": out.new_ones(n)}) for n in range(4, 4 + KEPT)),
    ):
        expected = args[0] + 2 * args[1]["read"]
        launch, (changed, _) = graphed(double_into, *args)
        launch()
        assert changed is not kept[0]
        torch.testing.assert_close(changed, expected.to(changed.dtype))
    assert len(graphs._GRAPHS.known) == KEPT


def test_what_reads_more_than_its_arguments_or_keeps_something_is_done_as_it_is():
    beside, kept = torch.ones(2, device=HERE), {}

    def reads(out):
        out.add_(beside)

    def keeps(out, known):
        known["seen"] = out * 2

    out = torch.zeros(2, device=HERE)
    cannot_be_copied = {"read": torch.ones(2, device=HERE), "other": lambda: 0}
    tried = ((reads, (out,)), (keeps, (out, kept)), (double_into, (out, cannot_be_copied)))
    for work, args in tried:
        launch, given = graphed(work, *args)
        assert all(a is b for a, b in zip(given, args, strict=True))
        launch()
    assert out.tolist() == [3, 3]
    assert kept["seen"].tolist() == [2, 2]  # of the ones that `reads` has left


@pytest.mark.skipif(not CUDA, reason="only a GPU has graphs, and work that waits for it")
def test_work_that_waits_for_a_gpu():
    def waits(out):
        out.mul_(1 + float(out[0]))

    launch, (out,) = graphed(waits, torch.ones(2, device=HERE))
    launch()
    assert out.tolist() == [2, 2]
    reserved = []
    for k in range(4):  # memory is taken once, and given back
        graphed(double_into, out, {"read": out + k})[0]()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[:1] * 3


LAYERS = {
    **{kind: partial(random_attention, kind) for kind in HARD},
    **{name: partial(layer, has=frozenset({name}), turned=2) for name in VARIANTS},
    "long": lambda seed: layer(seed, frozenset(), n=24, d_v=6),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_layers_of_one_shape_after_each_other(name, monkeypatch):
    """Their numbers are those of steps that are started one by one."""
    atts = [LAYERS[name](seed) for seed in (1, 3, 1)]  # of one make
    plain = [lb.spectral_norm(att, tol=1e-9) for att in atts]
    monkeypatch.setattr(InParts, "graphable", lambda op: not op._parts)
    kinds = []

    def seen(work, *args):
        launch, own = graphed(work, *args)
        kinds.append(own is not args)
        return launch, own

    monkeypatch.setattr("lipbound.linalg.krylov.graphed", seen)
    for att, expected in zip(atts, plain, strict=True):
        for options in ({"tol": 1e-9}, {"tol": 1e-3, "delta": 1e-6}):
            norm = lb.spectral_norm(att.to(HERE), **options)
            torch.testing.assert_close(norm.lower, expected.lower, rtol=options["tol"], atol=0)
    assert kinds
    assert all(kinds)
