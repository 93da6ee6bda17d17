"""What README.md says stays true."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from lipbound import bounds
from lipbound.jacobians.spectral_norm import PROOFS
from lipbound.linalg.operator_norm import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def benchmark(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_published_bounds_is_up_to_date() -> None:
    """As registered, and what is left out with a reason for each; ``python benchmarks/published.py`` writes it."""
    published, page = benchmark("published"), (ROOT / "docs" / "published.md").read_text()
    assert published.page() == page
    assert all(f"`{name}`" in page for name in bounds.names(None))
    assert all(one.reason in published.REASONS and one.remark and re.search(r"\b20[12]\d\b", one.source) for one in published.LEFT_OUT)


def test_nothing_claims_every_published_bound() -> None:
    """But for those that we know of, in the l2 norm, on softmax heads."""
    places = [
        ROOT / "setup.cfg",
        ROOT / "CITATION.cff",
        *ROOT.glob("*.md"),
        *(ROOT / "lipbound").rglob("*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
    claims = [" ".join(text.split())[:60] for path in places for text in re.findall(r"every published(?:.|\n){60}", path.read_text(), re.IGNORECASE)]
    assert claims
    assert [claim for claim in claims if not claim.lower().startswith("every published l2 bound on softmax heads that we know of")] == []


def test_generated_tables_are_up_to_date() -> None:
    """The bounds as registered, and accuracy.json as measured; ``make accuracy`` writes both."""
    readme = benchmark("readme")
    assert readme.written(README) == README
    assert all(f"| `{name}` |" in README for name in bounds.names(None))


def test_no_enclosure_of_the_accuracy_table_misses() -> None:
    rows = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())["rows"]
    assert {row["method"].split(",")[0] for row in rows} == {*METHODS, *PROOFS}
    assert all(row["outside"] in (0, None) for row in rows)


def test_the_first_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert (tmp_path / "minilm.pdf").exists()
    assert set(names["steepest"]) == {"layer", "head"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
