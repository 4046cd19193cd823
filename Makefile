# Every target makes what it needs, its virtual environment included. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
NEWEST_VENV ?= .venv-newest
CHIP ?= v7x
SHAPES ?= examples/shapes.yaml
JOBS ?= $(or $(shell nproc 2>/dev/null),2)
TUNE_ARGS ?=
TEST_ARGS ?=
ACCURACY_ARGS ?=
COMPILE_ARGS ?=
COMPARE_ARGS ?=

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
# All targets share one environment: two installs into it must not run at once.
.NOTPARALLEL:
.PHONY: help tune test test-newest lint format accuracy compiles calibrate compare clean

help: ## List the targets and the variables
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) CHIP=$(CHIP) SHAPES=$(SHAPES) JOBS=$(JOBS)"
	@echo "           TUNE_ARGS= (more options of kdagen tune)  TEST_ARGS= (more options of pytest)"
	@echo "           ACCURACY_ARGS= (options of benchmarks/accuracy.py, as --quick)"
	@echo "           COMPILE_ARGS= (options of benchmarks/compile_sample.py, as --chips=v6e)"
	@echo "           COMPARE_ARGS= (options of benchmarks/compare.py, as --parts=step)"

tune: $(VENV)/.installed-tpu ## Tune the shapes of SHAPES for CHIP; no TPU is needed
	$(BIN)/kdagen tune --chip $(CHIP) --shapes $(SHAPES) --jobs $(JOBS) $(TUNE_ARGS)

test: $(VENV)/.installed-test ## Run the tests, JOBS at a time
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TEST_ARGS)

test-newest: $(NEWEST_VENV)/.installed ## Run the tests on the newest Python and JAX
	$(NEWEST_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(TEST_ARGS)

lint: $(VENV)/.installed-dev ## Check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

accuracy: $(VENV)/.installed-tpu ## Tabulate the error of every implementation against float64
	$(BIN)/python benchmarks/accuracy.py --jobs $(JOBS) $(ACCURACY_ARGS)

compiles: $(VENV)/.installed-tpu ## Compile 40 random variants for every chip; check() must be right
	$(BIN)/python benchmarks/compile_sample.py --jobs $(JOBS) $(COMPILE_ARGS)

# The comparisons make an environment of their own: tokamax needs Python 3.12 or newer.
calibrate: ## Hold the time model against published measurements
	$(PYTHON) benchmarks/calibrate.py

compare: ## Model tokamax's forward and training step and these side by side
	$(PYTHON) benchmarks/compare.py $(COMPARE_ARGS)

clean: ## Remove the virtual environments and the caches
	rm -rf $(VENV) $(NEWEST_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# venv installs pip last, so its presence says that the environment is whole.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# One stamp an extra (tpu, test, dev); a change of the dependencies installs anew.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(NEWEST_VENV)/bin/pip:
	newest=$$($(PYTHON) benchmarks/newest_python.py) && "$$newest" -m venv $(NEWEST_VENV)

$(NEWEST_VENV)/.installed: pyproject.toml | $(NEWEST_VENV)/bin/pip
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[test]' 'jax>=0.12'
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade libtpu
	@touch $@
