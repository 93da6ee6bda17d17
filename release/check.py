"""Everything that must hold before a version is published: ``make release-check``. Nothing is uploaded.

The version is the same everywhere; citation file, workflows and issue forms are valid; wheel and source distribution are built twice from one commit
and come out the same; their metadata render and the wheel is small; it works in an environment of its own without
extras, where tests of the source distribution pass.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 16_000_000
"""Of the wheel."""
SCHEMAS = {
    "citation-file-format": ("CITATION.cff",),
    "github-workflows": tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))),
    "github-issue-forms": tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))),
}
TESTS = ("tests/attention", "tests/linalg", "tests/jacobians/test_spectral_norm.py", "tests/bounds/test_soundness.py", "tests/test_theory.py")
"""Of the source distribution, run without extras."""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command; SystemExit with all of it where it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def versions() -> dict[str, str]:
    """Where a version is written, and which."""
    places = {"lipbound/__init__.py": r'__version__ = "(.+)"', "CITATION.cff": r"(?m)^version: (.+)$", "CHANGELOG.md": r"(?m)^## (\d\S+)"}
    found = {place: re.search(pattern, (ROOT / place).read_text()) for place, pattern in places.items()}
    return {place: match[1] if match else "none" for place, match in found.items()}


def check_versions() -> None:
    """One version everywhere."""
    found = versions()
    if len(set(found.values())) != 1:
        raise SystemExit(f"versions differ: {found}")
    print(f"version {found['CITATION.cff']}")


def check_schemas() -> None:
    """Files that other programs read."""
    for schema, files in SCHEMAS.items():
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
        print(f"valid: {', '.join(files)}")


def build(commit: str, out: Path) -> dict[str, str]:
    """Both distributions of a commit, from a clone of its own; their sha256 by name."""
    with tempfile.TemporaryDirectory() as folder:
        run("git", "clone", "--quiet", ROOT, folder)
        run("git", "checkout", "--quiet", commit, cwd=Path(folder))
        time = run("git", "log", "-1", "--format=%ct", cwd=Path(folder)).strip()
        run(sys.executable, "-m", "build", "--outdir", out, folder, SOURCE_DATE_EPOCH=time)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def check_distributions(out: Path) -> tuple[Path, Path]:
    """Build them twice and look at them; the wheel and the source distribution."""
    commit = run("git", "rev-parse", "HEAD").strip()
    first, second = (build(commit, out / name) for name in ("first", "second"))
    if first != second:
        raise SystemExit(f"two builds of {commit} differ: {first} and {second}")
    wheel, source = (next((out / "first").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    for path in (wheel, source):
        print(f"{path.name}: {path.stat().st_size:,} bytes, sha256 {first[path.name]} twice")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"the wheel is larger than {MOST_BYTES:,} bytes")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, source).strip())
    print(run(sys.executable, "-m", "check_wheel_contents", wheel).strip())
    return wheel, source


def install(programs: Path, *packages: object) -> None:
    """Install packages into a virtual environment, in pinned versions."""
    run(programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)


def environment(folder: Path, wheel: Path) -> Path:
    """The programs of a new virtual environment with torch and the package."""
    venv.create(folder, with_pip=True)
    install(folder / "bin", "torch")
    install(folder / "bin", wheel)
    return folder / "bin"


def check_installed(programs: Path, folder: Path) -> None:
    """Help and a comparison in an empty folder."""
    folder.mkdir()
    for command in (["--help"], ["--version"], ["compare", "builtin:gpt2", "--samples", "1", "--max-length", "64"]):
        said = run(programs / "lipbound", *command, cwd=folder)
    if "0 not converged" not in said:
        raise SystemExit(f"builtin:gpt2 was not measured:\n{said}")
    print(f"works where it is installed: {said.strip().splitlines()[-2].strip()}")


def main() -> None:
    """All checks, one after the other."""
    check_versions()
    check_schemas()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, source = check_distributions(folder / "dist")
        programs = environment(folder / "environment", wheel)
        check_installed(programs, folder / "empty")
        run(
            programs / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--constraint",
            ROOT / "constraints.txt",
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "mpmath",
        )
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / source.name.removesuffix(".tar.gz")
        said = run(programs / "python", "-m", "pytest", "-m", "not slow", *TESTS, cwd=unpacked, LIPBOUND_TESTS_SHARE="0.02")
        print(f"tests of the source distribution: {said.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
