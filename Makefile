# `make demo` and `make test` work on a machine with nothing but Python 3.11 or newer and make: set-up is a prerequisite.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that really runs and is new enough.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# torch goes in first, and by this version, so that a machine's own choice of build (CPU, CUDA) is not replaced later.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOPICS := $(patsubst tests/bench/bench_%.py,%,$(wildcard tests/bench/bench_*.py))

# A run is a dozen Python processes: each would compile the package anew where the environment forbids to keep bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-fast crash-points fault-matrix soak lint format bench $(addprefix bench-,$(TOPICS)) clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with everything in it; runs again only when pyproject.toml changes

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or run make PYTHON=/path/to/python3." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip  # an old one may search for minutes
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test,dev]" "$(TORCH)"
	@touch $@

demo: $(STAMP)  ## train a small GPT with 2 workers, kill one, and show that nothing was lost
	@$(BIN)/ray-goodput demo $(ARGS)

# Tests without Ray share the cores, the long ones first, so that no core waits at the end for the other; those with Ray
# take turns, since two clusters on one host disturb each other.
SPREAD := --numprocesses logical --maxprocesses 8 --dist worksteal

test: lint  ## lint and all tests (not the benchmarks)
	$(BIN)/python -m pytest $(SPREAD) tests/fault tests/property tests/unit tests/contract $(ARGS)
	$(BIN)/python -m pytest tests/integration $(ARGS)

test-fast: $(STAMP)  ## the tests that need no Ray
	$(BIN)/python -m pytest $(SPREAD) tests/unit tests/property tests/contract $(ARGS)

crash-points: $(STAMP)  ## kill each process of a save before every storage call that it makes, on disk and S3
	$(BIN)/python tests/fault/crash_points.py

fault-matrix: $(STAMP)  ## everyone killed or stopped in every phase of a real run; takes about an hour
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/bench $(BIN)/python tests/integration/fault_matrix.py $(ARGS)

soak: $(STAMP)  ## one run under 40 random faults, and what is left of them; takes about a quarter of an hour
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/bench $(BIN)/python tests/integration/soak.py $(ARGS)

lint: $(STAMP)  ## ruff, pyright, import-linter, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: $(STAMP)  ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(addprefix bench-,$(TOPICS))  ## all benchmarks; bench-TOPIC for one
	@test -n "$(TOPICS)" || echo "There are no benchmarks in tests/bench yet."

$(addprefix bench-,$(TOPICS)): bench-%: $(STAMP)
	$(BIN)/python tests/bench/bench_$*.py $(ARGS)

clean:  ## remove what was built, but not .venv
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
