"""Fixtures of every folder. What lasts for a session is checked at its end: no test may have
changed it.

What needs transformers is imported by the fixtures themselves: the process that only hands out
tests to the others does not wait for it.
"""

import os

# small matrices: more threads wait for each other
os.environ.setdefault("LIPBOUND_TESTS_THREADS", "1")
# read when torch is imported, here and in processes that tests start
os.environ["OMP_NUM_THREADS"] = os.environ["LIPBOUND_TESTS_THREADS"]

import gc
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xarray as xr
from support.layers import KINDS, random_attention
from support.selection import combinations_left_out

import lipbound as lb
from lipbound import signs

signs.PAUSE = 3600.0  # on a busy machine any test may take longer than the pause between lines
torch.set_num_threads(int(os.environ["LIPBOUND_TESTS_THREADS"]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notebooks start first, then what else is in integration/: long tests at the end would keep
    one process busy when the others are done."""
    items.sort(key=lambda item: item.path.parent.name != "integration")
    items.sort(key=lambda item: not item.name.startswith("test_notebook_runs"))
    for item in combinations_left_out(items):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of small layer."""
    return request.param


@pytest.fixture
def att(kind: str) -> lb.Attention:
    """A float64 layer of every kind."""
    return random_attention(kind)


def _digest(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _unchanged(folder: Path) -> Iterator[Path]:
    before = _digest(folder)
    yield folder
    assert _digest(folder) == before, f"a test wrote to {folder}; it must copy what it changes"


def _shared(ds: xr.Dataset) -> Iterator[xr.Dataset]:
    before = ds.copy(deep=True)
    yield ds
    assert ds.identical(before), "a test changed the run that others share"


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small BERT with tokenizer; copy the folder to change it."""
    from support.models import save_bert

    yield from _unchanged(save_bert(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small ViT with image processor; copy the folder to change it."""
    from support.models import save_vit

    yield from _unchanged(save_vit(tmp_path_factory.mktemp("vit")))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of words that the small BERT knows."""
    folder = tmp_path_factory.mktemp("text")
    words = "the ferry is in a clock of the keeper and the lighthouse "
    (folder / "text.txt").write_text(words * 8)
    for _ in _unchanged(folder):
        yield folder / "text.txt"


@pytest.fixture(scope="session")
def gpt2_run() -> Iterator[xr.Dataset]:
    """A run of all bounds on a small GPT-2, 2 samples x 2 layers x 4 heads; take
    ``copy(deep=True)`` to change it."""
    from support.models import AFFINE, build, inputs_for

    model = build(AFFINE["gpt2"])
    ds = lb.compare(model, inputs_for(model), progress=False)
    yield from _shared(ds)


@pytest.fixture(scope="session")
def whole(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[xr.Dataset]:
    """The run of `support.runs` in one go, as it is stored."""
    from support.runs import OPTIONS, TEXTS

    from lipbound.runs import store

    path = tmp_path_factory.mktemp("whole") / "run.zarr"
    lb.compare(bert, TEXTS, out=path, **OPTIONS)
    assert not store.partial_path(path).exists()
    ds = store.load(path).load()
    yield from _shared(ds)
