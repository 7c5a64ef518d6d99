# The first run makes .venv and installs into it; later runs start at once. Another interpreter: make PYTHON=/path/to/python test

SUITABLE := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13 python3.14; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin

.PHONY: help coverage demo check-demo test test-programs test-all doors check package bench bench-sharded models benchmarks constraints docs lint \
	setup-demo setup-test clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: setup-demo  ## a small language model learns while a live engine follows it
	$(BIN)/instep demo

check-demo: setup-demo  ## whether the demo's results are what they must be
	$(BIN)/python scripts/check_demo.py

test: lint  ## everything but whole programs and exhaustive cases, with a real vLLM
	$(BIN)/pytest -n 2

test-programs: lint  ## whole programs: demos, benchmarks, families of models, load
	$(BIN)/pytest -n 2 -m "program and not exhaustive"

test-all: lint  ## everything
	$(BIN)/pytest -n 2 -m ""

doors: setup-test  ## what verl, OpenRLHF and SkyRL send, against a real vLLM
	$(BIN)/python scripts/doors.py

check: lint  ## lint, types and unit tests (layers among them), in a few minutes
	$(BIN)/pytest -n 2 tests/unit

# Its tracer hangs CPython 3.11 where a thread is stopped from outside, as generation's are: those tests are left out
CORE := tests/unit/test_*.py $(addprefix tests/unit/,engine plan ranks receiver source transport) tests/contract tests/sharded

coverage: setup-test  ## lines and branches of the core that its tests run; fails where they are fewer than before
	$(BIN)/pytest -n 2 $(CORE) --cov --cov-report=term:skip-covered

package: setup-test  ## sdist and wheel, checked, and the wheel tried without vLLM
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python scripts/check_wheel.py dist

constraints: setup-test  ## constraints.txt anew, from the versions in .venv
	$(BIN)/python scripts/constraints.py

bench: setup-test  ## push, and compare with what one would do instead and with what the machine can do
	$(BIN)/instep bench --out bench/results
	$(MAKE) benchmarks

bench-sharded: setup-test  ## pushes from 2 and 4 ranks of a sharded trainer, without gathering and with it
	$(BIN)/python -m instep.bench.sharded --out bench/results
	$(MAKE) benchmarks

models: setup-test  ## which families of models a push serves: tries each on a real vLLM
	$(BIN)/python -m instep.bench.models --jobs 2 --out bench/results
	$(MAKE) benchmarks

benchmarks: setup-test  ## docs/benchmarks.md, its picture and docs/models.md, from bench/results
	$(BIN)/python -m instep.bench.page bench/results docs
	$(BIN)/python -m instep.bench.models.page bench/results docs

docs: setup-test  ## the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup-test  ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

setup-demo setup-test: setup-%:
	@"$(PYTHON)" -c '$(SUITABLE)' || { echo "instep needs Python 3.11 or newer with its venv module: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup.py $*

clean:  ## remove what these commands made, .venv included
	rm -rf .venv .cache build dist demo-results bench-results .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
