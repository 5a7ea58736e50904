PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

export OMP_NUM_THREADS := 1
# With "quick", pytest leaves out the tests of tests/long_tests.txt.
export PENSTOCK_TESTS ?= quick
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes, which would compile the same files again and again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check test-torch bench fuzz docs serve clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## Train a small GPT on two processes by a zero-bubble schedule and by 1F1B, and compare
	@$(BIN)/penstock demo

# Four files at a time: ranks mostly wait. Tests of one file stay together, as they share processes.
# They keep the order of tests/conftest.py, which puts the longest first.
# With TORCH, the tests run on that version instead: see test-torch.
test: $(if $(TORCH),test-torch,check) ## Run check, then the quick ones of the tests that start processes or a browser
ifndef TORCH
	@scripts/browser
	@scripts/hosts
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder tests/dist tests/hosts tests/browser
endif

test-all: ## Run the checks and all tests, those that take longest too
	@$(MAKE) --no-print-directory test PENSTOCK_TESTS=all

check: $(READY) ## Check format, lint and types; run the quick tests that need one process
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist worksteal --ignore=tests/dist --ignore=tests/hosts --ignore=tests/browser

TORCH_BIN = .venv-torch-$(TORCH)/bin

# All but torch is as in .venv, so what fails is due to torch.
test-torch: ## Run the tests on another torch, in its own venv: make test-all TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "Name a version, as in make test-all TORCH=2.15.0"; exit 1; }
	@$(MAKE) --no-print-directory .venv-torch-$(TORCH)/.ready
	$(TORCH_BIN)/pytest -n auto --dist worksteal --ignore=tests/dist --ignore=tests/hosts --ignore=tests/browser
	$(TORCH_BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder tests/dist

bench: $(READY) ## Run the benchmarks in full
	$(BIN)/python benchmarks/split_backward/main.py
	$(BIN)/python benchmarks/simulate/main.py
	$(BIN)/python benchmarks/timed_stages/main.py
	$(BIN)/python benchmarks/two_ranks/main.py
	$(BIN)/python benchmarks/balance/main.py
	$(BIN)/python benchmarks/skips/main.py
	$(BIN)/python benchmarks/search/main.py
	$(BIN)/python benchmarks/uneven/main.py
	$(BIN)/python benchmarks/microbatch_order/main.py
	$(BIN)/python benchmarks/recording/main.py
	$(BIN)/python benchmarks/sharded_stages/main.py
	$(BIN)/python benchmarks/compiled_stages/main.py
	$(BIN)/python benchmarks/host_time/main.py time
	$(BIN)/python benchmarks/first_step/main.py
	$(BIN)/python benchmarks/memory/main.py
	$(BIN)/python benchmarks/pretrained/main.py
	@scripts/hosts
	$(BIN)/python benchmarks/faults/main.py
	@scripts/browser
	$(BIN)/python benchmarks/studio/main.py

fuzz: $(READY) ## Run the tests that draw random examples, on many more of them
	PENSTOCK_FUZZ=1 $(BIN)/pytest -m fuzz

# The theme would print an advertisement for its successor; this is its own switch against it.
docs serve: export NO_MKDOCS_2_WARNING := 1

docs: $(READY) ## Build the site of the docs into site/, and stop at any warning
	$(BIN)/mkdocs build --strict
	@echo "Open site/index.html; its search needs a server, such as make serve"

serve: $(READY) ## Show the site of the docs at http://127.0.0.1:8000, and build it again when a file changes
	$(BIN)/mkdocs serve

clean: ## Remove .venv, caches and build output
	rm -rf .venv .venv-torch-* penstock-demo penstock-examples .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# The build backend goes in first, so that it is the one of constraints.txt:
# an isolated build would fetch the newest.
# pip would compile on one core. Some packages have files that are for other versions of Python.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: set PYTHON, as in make PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up .venv (about a minute, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq -c constraints.txt hatchling editables
	@$(BIN)/pip install -qq -c constraints.txt --no-build-isolation --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

.venv-torch-%/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv-torch-$* (several minutes and up to 6 GB, once)"
	@$(PYTHON) -m venv .venv-torch-$*
	@sed 's/^torch==.*/torch==$*/' constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/pip install -qq -c .venv-torch-$*/constraints.txt hatchling editables
	@.venv-torch-$*/bin/pip install -qq -c .venv-torch-$*/constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
