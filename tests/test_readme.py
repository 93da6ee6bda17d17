"""What README.md says stays true."""

import re
from pathlib import Path

import pytest

from lipbound import bounds

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", bounds.names())
def test_every_bound_is_in_the_table_as_registered(name: str) -> None:
    bound = bounds.get(name)
    statement = bound.statement.replace("|", "\\|")
    assert f"| `{name}` | {statement} [{bound.source}] | {bound.assumptions} |" in README


def test_the_first_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(code, names)
    assert (tmp_path / "minilm.pdf").exists()
    assert set(names["steepest"]) == {"layer", "head"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
