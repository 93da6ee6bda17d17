"""Rewrite the generated tables of README.md: the bounds, from the registry, and the accuracy of every method, from accuracy.json."""

import json
import re
from pathlib import Path

from lipbound import bounds

ROOT = Path(__file__).parents[1]


def bounds_table() -> str:
    """Every registered bound with its statement, source and assumptions."""
    rows = ["| name | statement | a bound when |", "|---|---|---|"]
    for bound in map(bounds.get, bounds.names()):
        statement = bound.statement.replace("|", "\\|")
        rows.append(f"| `{bound.name}` | {statement} [{bound.source}] | {bound.assumptions} |")
    return "\n".join(rows)


def accuracy_table() -> str:
    """What benchmarks/accuracy.py has measured."""
    rows = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())["rows"]
    lines = ["| heads | method | dtype | device | largest error | widest enclosure | outside |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        width = "none" if row["width"] is None else f"{row['width']:.1e}"
        outside = "none" if row["outside"] is None else str(row["outside"])
        lines.append(f"| {row['heads']} | `{row['method']}` | {row['dtype']} | {row['device']} | {row['error']:.1e} | {width} | {outside} |")
    return "\n".join(lines)


TABLES = {"bounds": bounds_table, "accuracy": accuracy_table}


def written(text: str) -> str:
    """README.md with its generated tables as they should be."""
    for name, table in TABLES.items():
        text = re.sub(rf"(<!-- {name}: [^\n]*-->\n\n).*?(\n\n<!-- end -->)", lambda m, t=table: m[1] + t() + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text()))
