"""Types reach those who install the package: from its wheel, and where it is installed editable."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])('.'))"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and what is needed to build it."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lipbound", folder / "lipbound")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    return folder


def run(*words: object, cwd: Path) -> str:
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = tuple(map(str, words))
    done = subprocess.run(words, cwd=cwd, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, how: str) -> zipfile.ZipFile:
    """A wheel, of ``build_wheel`` or ``build_editable``."""
    said = run(sys.executable, "-c", BUILD, how, cwd=source)
    return zipfile.ZipFile(source / said.splitlines()[-1])


def test_an_editable_install_is_a_path(source: Path) -> None:
    """Type checkers do not run the programs by which others are found."""
    with built(source, "build_editable") as wheel:
        paths = [name for name in wheel.namelist() if "dist-info" not in name]
        assert len(paths) == 1
        assert Path(wheel.read(paths[0]).decode().strip()) == source.resolve()
    assert (source / "lipbound" / "py.typed").exists()


@pytest.mark.slow
def test_what_users_write_is_typed_by_the_wheel(source: Path, tmp_path: Path) -> None:
    """In an environment that has it, and all else from this one."""
    venv.create(tmp_path / "environment", with_pip=False)
    there = {"base": str(tmp_path / "environment"), "platbase": str(tmp_path / "environment")}
    packages = Path(sysconfig.get_path("purelib", vars=there))
    with built(source, "build_wheel") as wheel:
        wheel.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", vars=there)) / "python"
    where = run(python, "-c", "import lipbound; print(lipbound.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    options = ("--strict", "--config-file", os.devnull, "--python-executable", python)
    cache = ("--cache-dir", ROOT / ".mypy_cache" / "typical_uses")
    uses = ROOT / "checks" / "typical_uses.py"
    run(sys.executable, "-m", "mypy", *options, *cache, uses, cwd=tmp_path)
