"""Build the documentation site, without a network: ``make docs`` writes build/docs/html. Every
warning is an error."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: small matrices
sys.path.insert(0, str(Path(__file__).parent))
from sitegen import tree

HERE = Path(__file__).parent


def main() -> int:
    """Write the source tree, then build it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE.parent / "build" / "docs",
        help="folder of the source tree and of the site",
    )
    out: Path = parser.parse_args().out
    start = time.perf_counter()
    tree.write(out / "source")
    written = time.perf_counter()
    from sphinx.cmd.build import build_main

    status = build_main(
        [
            "-b",
            "html",
            "-W",
            "--keep-going",
            "-n",
            "-q",
            "-E",
            "-j",
            "2",
            "-c",
            str(HERE),
            str(out / "source"),
            str(out / "html"),
        ]
    )
    ended = time.perf_counter()
    print(
        f"{out / 'html' / 'index.html'}: pages written in {written - start:.0f} s, built in "
        f"{ended - written:.0f} s"
    )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
