"""Fixtures of every folder. What lasts for a session is checked at its end: no test may have
changed it.

What needs torch is imported by the fixtures themselves: the process that only hands out tests to
the others does not wait for it. Functions of tests are not annotated: no type checker reads them.
"""

import os

# small matrices: more threads wait for each other. OMP_NUM_THREADS is read when torch is imported,
# here and in processes that tests start
os.environ["OMP_NUM_THREADS"] = os.environ.setdefault("LIPBOUND_TESTS_THREADS", "1")

import gc
import hashlib

import pytest
from support.kinds import KINDS
from support.selection import combinations_left_out

import lipbound as lb
from lipbound import signs

# no collection until tests are collected: hardly anything of what is imported is garbage
gc.set_threshold(0)
signs.PAUSE = 3600.0  # on a busy machine any test may take longer than the pause between lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Notebooks start first, then what else is in integration/: long tests at the end would keep
    one process busy when the others are done."""
    items.sort(key=lambda item: item.path.parent.name != "integration")
    items.sort(key=lambda item: not item.name.startswith("test_notebook_runs"))
    for item in combinations_left_out(items):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look at it again. It looks at
    the rest less often than by itself, which would be a twentieth of all time."""
    import torch

    torch.set_num_threads(int(os.environ["LIPBOUND_TESTS_THREADS"]))
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(params=KINDS)
def kind(request):
    """Every kind of small layer."""
    return request.param


@pytest.fixture
def att(kind):
    """A float64 layer of every kind."""
    from support.layers import random_attention

    return random_attention(kind)


def _digest(folder):
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _unchanged(folder):
    before = _digest(folder)
    yield folder
    assert _digest(folder) == before, f"a test wrote to {folder}; it must copy what it changes"


def _shared(ds):
    before = ds.copy(deep=True)
    yield ds
    assert ds.identical(before), "a test changed the run that others share"


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """A small BERT with tokenizer; copy the folder to change it."""
    from support.models import save_bert

    yield from _unchanged(save_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """A small ViT with image processor; copy the folder to change it."""
    from support.models import save_vit

    yield from _unchanged(save_vit(tmp_path_factory.mktemp("vit")))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of words that the small BERT knows."""
    folder = tmp_path_factory.mktemp("text")
    words = "the ferry is in a clock of the keeper and the lighthouse "
    (folder / "text.txt").write_text(words * 8)
    for _ in _unchanged(folder):
        yield folder / "text.txt"


@pytest.fixture(scope="session")
def wide_layers(bert):
    """The layers of the small BERT at the texts of `support.runs`, padded, in float64."""
    from support.runs import TEXTS

    checkpoint = lb.load_checkpoint(bert, dtype="float64")
    return lb.capture(checkpoint, lb.prepare(checkpoint, TEXTS, max_length=12))


@pytest.fixture(scope="session")
def gpt2_run():
    """A run of all bounds on a small GPT-2, 2 samples x 2 layers x 4 heads; take
    ``copy(deep=True)`` to change it."""
    from support.models import AFFINE, build, inputs_for

    model = build(AFFINE["gpt2"])
    ds = lb.compare(model, inputs_for(model), progress=False)
    yield from _shared(ds)


@pytest.fixture(scope="session")
def whole(bert, tmp_path_factory):
    """The run of `support.runs` in one go, as it is stored."""
    from support.runs import OPTIONS, TEXTS

    from lipbound.runs import store

    path = tmp_path_factory.mktemp("whole") / "run.zarr"
    lb.compare(bert, TEXTS, out=path, **OPTIONS)
    assert not store.partial_path(path).exists()
    ds = store.load(path).load()
    yield from _shared(ds)
