"""Both distributions of a clean checkout, the same bytes whenever they are built:
``python release/build.py [OUT]``, ``dist`` by default.

Wheels follow SOURCE_DATE_EPOCH, the date of the last commit; source distributions are packed again
with sorted entries of that date and no owner.
"""

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(folder: Path, out: Path) -> list[Path]:
    """The wheel and the source distribution of a checkout, sorted by name."""
    date = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, folder],
        env=os.environ | {"SOURCE_DATE_EPOCH": date},
        check=True,
    )
    for source in out.glob("*.tar.gz"):
        source.write_bytes(packed(source, int(date)))
    return sorted(out.iterdir())


def packed(source: Path, date: int) -> bytes:
    """The contents of a source distribution with sorted entries, one date, and neither owners nor
    machine-dependent modes."""
    buffer = io.BytesIO()
    with (
        tarfile.open(source) as old,
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=date, filename="") as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            entry = tarfile.TarInfo(member.name)
            entry.type, entry.size, entry.mtime = member.type, member.size, date
            entry.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(entry, old.extractfile(member) if member.isfile() else None)
    return buffer.getvalue()


if __name__ == "__main__":
    print(*build(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else "dist")), sep="\n")
