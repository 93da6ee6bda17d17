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
    text = "folder of the source tree and of the site"
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "docs", help=text)
    out: Path = parser.parse_args().out
    start = time.perf_counter()
    tree.write(out / "source")
    written = time.perf_counter()
    from sphinx.cmd.build import build_main

    options = ["-b", "html", "-W", "--keep-going", "-n", "-q", "-E", "-j", "2"]
    status = build_main([*options, "-c", str(HERE), str(out / "source"), str(out / "html")])
    seconds = f"{written - start:.0f} s, built in {time.perf_counter() - written:.0f} s"
    print(f"{out / 'html' / 'index.html'}: pages written in {seconds}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
