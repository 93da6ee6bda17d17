"""What is published says one thing everywhere: lowest versions, the recipe for conda, Pythons, the
date of a version."""

import configparser
import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.checks import script

ROOT = Path(__file__).parents[1]
PACKAGE = configparser.ConfigParser()
PACKAGE.read(ROOT / "setup.cfg")
RECIPE = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Where conda-forge calls a package otherwise."""
OLD = {"transformers", "huggingface-hub"}
"""Those whose lowest versions `make test-old` tests, not with the whole suite: transformers lacks
some of what that needs before version 5, and version 5 needs a newer huggingface_hub."""
TOOLS = {"docs", "release", "test", "dev"}
"""Extras of those who work on the package; nothing that it imports."""


def pins(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def listed(section, name):
    """The lines of a value of setup.cfg."""
    return [line for line in PACKAGE[section][name].splitlines() if line]


def named(requirements):
    return {canonicalize_name(one.name): one for one in map(Requirement, requirements)}


EXTRAS = {
    name: listed("options.extras_require", name) for name in PACKAGE["options.extras_require"]
}
DEPENDENCIES = listed("options", "install_requires")
DIRECT = named(
    [*DEPENDENCIES, *(one for extra, of in EXTRAS.items() if extra not in TOOLS for one in of)]
)


def test_lowest_versions_are_those_that_are_tested():
    least, old, newest = (pins(f"constraints{end}.txt") for end in ("-min", "-old", ""))
    for name, one in DIRECT.items():
        (specifier,) = one.specifier
        assert specifier.operator in (">=", "==")
        assert specifier.version == (old if name in OLD else least)[name]
        assert one.specifier.contains(newest[name])
    for one in (Requirement(one) for of in (DEPENDENCIES, *EXTRAS.values()) for one in of):
        name = canonicalize_name(one.name)
        assert one.specifier == DIRECT.get(name, one).specifier, one


def test_hooks_run_the_versions_that_make_lint_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    found = re.findall(r"additional_dependencies: \[([\w-]+)==([\w.]+)\]", hooks)
    assert {"ruff", "codespell", "import-linter"} == {name for name, _ in found}
    assert all(pins("constraints.txt")[name] == version for name, version in found)


def conda(requirements):
    return {
        f"{CONDA_NAMES.get(one.name, one.name)} {one.specifier}"
        for one in named(requirements).values()
    }


def test_recipe_requires_what_the_package_does():
    lowest = PACKAGE["options"]["python_requires"].removeprefix(">=")
    context, requirements = RECIPE["context"], RECIPE["requirements"]
    assert context["python_min"] == lowest
    assert set(requirements["run"]) == conda(DEPENDENCIES) | {"python >=${{ python_min }}"}
    build = conda(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
    assert set(requirements["host"]) == build | {"python ${{ python_min }}.*", "pip"}
    scripts = listed("options.entry_points", "console_scripts")
    assert RECIPE["build"]["python"]["entry_points"] == scripts
    about, ours = RECIPE["about"], PACKAGE["metadata"]
    assert about["license_file"] == listed("metadata", "license_files")
    assert (about["summary"], about["license"]) == (ours["description"], ours["license"])


def test_the_description_for_an_index_has_no_links_to_files():
    """There is no address that they could lead to; their texts stay."""
    words = [sys.executable, "setup.py", "--long-description"]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert "what `exact_upper` means" in text


def test_pythons_are_those_that_the_workflow_tests():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    classifiers = "\n".join(listed("metadata", "classifiers"))
    claimed = re.findall(r"Python :: (3\.\d+)", classifiers)
    assert claimed == workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]


@pytest.fixture
def program(monkeypatch):
    """Programs of release/, which import their neighbours."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return lambda name: script(ROOT / "release" / f"{name}.py")


DATED = "# Changelog\n\n## 1.2.0 - 2026-01-31\n"
CITED = "version: 1.2.0\ndate-released: 2026-01-31\n"


UNRELEASED = "## 1.2.0 - Unreleased\n"


def test_a_tagged_version_is_dated(program):
    fault = program("check").release_fault
    for tags, changelog, citation, said in (
        ([], DATED, CITED, None),
        ([], UNRELEASED, "version: 1.2.0\n", None),
        (["v1.2.0"], DATED, CITED, None),
        (["v1.3.0"], DATED, CITED, "are not v1.2.0"),
        (["v1.2.0", "v1.3.0"], DATED, CITED, "are not v1.2.0"),
        (["v1.2.0"], UNRELEASED, CITED, "no dated section"),
        (["v1.2.0"], "## 1.2.0\n", CITED, "no dated section"),
        (["v1.2.0"], "## 1x2y0 - 2026-01-31\n", CITED, "no dated section"),
        (["v1.2.0"], DATED, "version: 1.2.0\n", "date-released: nothing"),
        (["v1.2.0"], DATED, CITED.replace("31", "30"), "date-released: 2026-01-30"),
    ):
        found = fault("1.2.0", tags, changelog, citation)
        assert found is said is None or said in found


def test_versions_agree(program):
    found = program("check").versions()
    assert set(found.values()) == {found["lipbound/__init__.py"]}
    assert len(found) == 4


def test_recipe_gets_the_sum_of_a_source_distribution(tmp_path, program):
    recipe = program("recipe")
    source = tmp_path / f"lipbound-{RECIPE['context']['version']}.tar.gz"
    source.write_bytes(b"what was packed")
    filled = yaml.safe_load(recipe.filled(source))
    packed = hashlib.sha256(b"what was packed").hexdigest()
    assert filled == RECIPE | {"context": RECIPE["context"] | {"sha256": packed}}
    with pytest.raises(SystemExit, match=re.escape("lipbound-9.9.9.tar.gz")):
        recipe.filled(source.rename(tmp_path / "lipbound-9.9.9.tar.gz"))
