"""The source of the documentation site: pages by hand, pages written from the package and from what
was measured, and the files they show."""
