"""Our own bounds at a point."""

CITATION = "lipbound2026"
BIBTEX = """@misc{lipbound2026,
  title  = {lipbound: exact local {L}ipschitz constants of attention heads, beside published
            bounds},
  author = {{The lipbound developers}},
  year   = {2026},
  note   = {Software}
}"""
