# The first run makes .venv and installs into it; later runs start at once. Another interpreter: make PYTHON=/path/to/python test

SUITABLE := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.13 python3.14; do \
	$$python -c '$(SUITABLE)' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin

.PHONY: demo test check bench bench-sharded benchmarks docs lint setup-demo setup-test clean

demo: setup-demo  ## a small language model learns while a live engine follows it
	$(BIN)/instep demo

test: lint  ## everything, with a real vLLM
	$(BIN)/pytest

check: lint  ## lint, types and unit tests (layers among them), in a few minutes
	$(BIN)/pytest tests/unit

bench: setup-test  ## push, and compare with what one would do instead and with what the machine can do
	$(BIN)/instep bench --out bench/results
	$(MAKE) benchmarks

bench-sharded: setup-test  ## pushes from 2 and 4 ranks of a sharded trainer, without gathering and with it
	$(BIN)/python -m instep.bench.sharded --out bench/results
	$(MAKE) benchmarks

benchmarks: setup-test  ## docs/benchmarks.md and its picture, from the results in bench/results
	$(BIN)/python -m instep.bench.page bench/results docs

docs: setup-test  ## the documentation as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

setup-demo setup-test: setup-%:
	@"$(PYTHON)" -c '$(SUITABLE)' || { echo "instep needs Python 3.11 or newer with its venv module: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup.py $*

clean:
	rm -rf .venv build dist demo-results bench-results .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
