PYTHON ?= python3.11
PACKAGES ?= newest
BIN := .venv/bin
# Several processes share the cores: with more threads each they would wait for each other. Hundreds are started, which
# would compile the package anew where no bytecode may be written.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
INSTALL := $(BIN)/pip install --disable-pip-version-check -c constraints.txt -e

# A pipe fails with its first part.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
.PHONY: help train test soak versions check docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

train: $(STAMP) ## train a small net on digits with 2 ranks; a report at the end
	$(BIN)/fourmin train

test: $(STAMP) ## run the tests
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

soak: $(STAMP) ## run what takes long: hundreds of faults and races, thousands of steps
	$(PYTEST) -n 2 --dist worksteal --timeout 1800 -rA --show-capture=stdout tests/soak/soak_*.py | tee soak.log
	$(BIN)/python benchmarks/faults.py soak.log

versions: $(STAMP) ## run the main tests in a fresh environment: make versions PYTHON=python3.12 PACKAGES=oldest TORCH=2.14.1
	$(BIN)/python tests/versions.py $(PYTHON) $(PACKAGES) $(if $(TORCH),--torch $(TORCH))

check: $(STAMP) ## lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_STAMP) ## build the documentation into site/, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the virtual environment, caches and builds
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site soak.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[demo,dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) '.[docs]'
	@touch $@
