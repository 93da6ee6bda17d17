"""What README.md says stays true."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from lipbound import bounds
from lipbound.jacobians.spectral_norm import PROOFS
from lipbound.linalg.operator_norm import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_generated_tables_are_up_to_date() -> None:
    """The bounds as registered, and accuracy.json as measured; ``make accuracy`` writes both."""
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
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
