"""Everything that must hold before a version is published: ``make release-check``. Nothing is
uploaded.

The version is the same everywhere, and what is tagged is dated; citation file, workflows and issue
forms are valid; both distributions are built twice from one commit and come out the same; their
metadata and the recipe for conda render, and the wheel is small; it works without extras in two
environments, with the lowest versions that it admits and with those of constraints.txt, where tests
of the source distribution pass.
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

import recipe

ROOT = Path(__file__).parents[1]
MOST_BYTES = 16_000_000
"""Of the wheel."""
SCHEMAS = {
    "citation-file-format": ("CITATION.cff",),
    "github-workflows": tuple(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    ),
    "github-issue-forms": tuple(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    ),
}
TESTS = (
    "tests/attention",
    "tests/linalg",
    "tests/jacobians/test_spectral_norm.py",
    "tests/bounds/test_soundness.py",
    "tests/test_theory.py",
)
"""Of the source distribution, run without extras."""


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command; SystemExit with all of it where it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def versions() -> dict[str, str]:
    """Where a version is written, and which."""
    places = {
        "lipbound/__init__.py": r'__version__ = "(.+)"',
        "CITATION.cff": r"(?m)^version: (.+)$",
        "CHANGELOG.md": r"(?m)^## (\d\S+)",
        "conda/recipe.yaml": r'(?m)^  version: "(.+)"$',
    }
    found = {
        place: re.search(pattern, (ROOT / place).read_text()) for place, pattern in places.items()
    }
    return {place: match[1] if match else "none" for place, match in found.items()}


def check_versions() -> None:
    """One version everywhere."""
    found = versions()
    if len(set(found.values())) != 1:
        raise SystemExit(f"versions differ: {found}")
    version = found["CITATION.cff"]
    tags = run("git", "tag", "--points-at", "HEAD").split()
    fault = release_fault(
        version,
        [tag for tag in tags if tag.startswith("v")],
        *((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")),
    )
    if fault:
        raise SystemExit(fault)
    print(f"version {version}, tagged {', '.join(tags) or 'nothing'}")


def release_fault(version: str, tags: list[str], changelog: str, citation: str) -> str | None:
    """What keeps a commit with these tags from being a release, in one sentence; None where it has
    no tag, or is in order.

    A tagged version has a dated section in the changelog, ``## 0.1.0 - 2026-01-31``, and the
    citation file has the same date.
    """
    if not tags:
        return None
    if tags != [f"v{version}"]:
        return f"the tags {tags} are not v{version}"
    dated = re.search(rf"(?m)^## {re.escape(version)} - (\d{{4}}-\d\d-\d\d)$", changelog)
    if dated is None:
        return (
            f"CHANGELOG.md has no dated section for the tagged version: write ## {version} - "
            "YYYY-MM-DD"
        )
    cited = re.search(r"(?m)^date-released: (\S+)$", citation)
    if cited is None or cited[1] != dated[1]:
        return (
            f"CITATION.cff says date-released: {cited[1] if cited else 'nothing'}, "
            f"CHANGELOG.md {dated[1]}"
        )
    return None


def check_schemas() -> None:
    """Files that other programs read."""
    for schema, files in SCHEMAS.items():
        run(
            sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files
        )
        print(f"valid: {', '.join(files)}")


def built(commit: str, out: Path) -> dict[str, str]:
    """Both distributions of a commit, from a clone of its own; their sha256 by name."""
    with tempfile.TemporaryDirectory() as folder:
        run("git", "clone", "--quiet", ROOT, folder)
        run("git", "checkout", "--quiet", commit, cwd=Path(folder))
        run(sys.executable, Path(folder) / "release" / "build.py", out)
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())
    }


def check_distributions(out: Path) -> tuple[Path, Path]:
    """Build them twice and look at them; the wheel and the source distribution."""
    commit = run("git", "rev-parse", "HEAD").strip()
    first, second = (built(commit, out / name) for name in ("first", "second"))
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


def check_recipe(source: Path) -> None:
    """The recipe for conda renders to the version and the sum of this source distribution. Nothing
    is solved: that needs channels."""
    from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

    settings = RenderConfig(platform=PlatformConfig(target_platform="linux-64"))
    (variant,) = Stage0Recipe.from_yaml(recipe.filled(source)).render(VariantConfig(), settings)
    rendered = variant.recipe.to_dict()
    (origin,) = rendered["source"]
    if (
        origin["sha256"] != hashlib.sha256(source.read_bytes()).hexdigest()
        or Path(origin["path"]).name != source.name
    ):
        raise SystemExit(f"the recipe is of another source: {origin}")
    print(f"conda/recipe.yaml: renders, {len(rendered['requirements']['run'])} requirements")


def install(programs: Path, constraints: str, *packages: object) -> None:
    """Install packages into a virtual environment, in the versions of a file of constraints."""
    run(
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / constraints,
        *packages,
    )


def environment(folder: Path, constraints: str, wheel: Path) -> Path:
    """The programs of a new virtual environment with torch and the package."""
    venv.create(folder, with_pip=True)
    install(folder / "bin", constraints, "torch")
    install(folder / "bin", constraints, wheel)
    return folder / "bin"


def check_installed(programs: Path, folder: Path) -> None:
    """Help and a comparison in an empty folder."""
    folder.mkdir()
    for command in (
        ["--help"],
        ["--version"],
        ["compare", "builtin:vit", "--samples", "1"],
        ["compare", "builtin:gpt2", "--samples", "1", "--max-length", "64"],
    ):
        said = run(programs / "lipbound", *command, cwd=folder)
    if "exact norms: 24 (6 layers x 4 heads" not in said or "not converged" in said:
        raise SystemExit(f"builtin:gpt2 was not measured:\n{said}")
    print(f"works where it is installed: {said.strip().splitlines()[-2].strip()}")


def check_types(programs: Path, folder: Path) -> None:
    """What users write is typed, as mypy reads it in an environment with the wheel."""
    install(programs, "constraints.txt", "mypy")
    uses = ROOT / "checks" / "typical_uses.py"
    strict = ("-m", "mypy", "--strict", "--config-file", os.devnull)
    print(f"types: {run(programs / 'python', *strict, uses, cwd=folder).strip()}")


def main() -> None:
    """All checks, one after the other."""
    check_versions()
    check_schemas()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, source = check_distributions(folder / "dist")
        check_recipe(source)
        for constraints in ("constraints-min.txt", "constraints.txt"):
            programs = environment(folder / f"environment-{constraints}", constraints, wheel)
            check_installed(programs, folder / f"empty-{constraints}")
        check_types(programs, folder)
        install(programs, "constraints.txt", "pytest", "pytest-xdist", "hypothesis", "mpmath")
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / source.name.removesuffix(".tar.gz")
        said = run(
            programs / "python",
            "-m",
            "pytest",
            "-m",
            "not slow",
            *TESTS,
            cwd=unpacked,
            LIPBOUND_TESTS_SHARE="0.02",
        )
        print(f"tests of the source distribution: {said.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
