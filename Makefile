# `make demo` and `make test` do all set-up themselves. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup yang demo test test-slow lint clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv and install bywash with its pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null \
	  || { echo "bywash needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setup: creating $(VENV) and installing (one to three minutes the first time)"
	@$(PYTHON) -m venv $(VENV) || { echo "setup: 'apt-get install python3-venv' may be missing"; exit 1; }
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

yang: setup      ## install libyang, for validation with SONiC's YANG models (Debian, root)
	@$(BIN)/python -c 'import libyang' 2>/dev/null || { \
	  { [ -f /usr/include/libyang/libyang.h ] || { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libyang2-dev gcc python3-dev; }; } >/dev/null 2>&1; \
	  $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[yang]' 2>/dev/null; } \
	  || echo "yang: libyang could not be installed (libyang2-dev, a C compiler and root are needed); YANG tests will skip"

demo: setup      ## run a MoE model over 4 local processes and check it against one process
	@echo "demo: a MoE model with its experts spread over 4 local processes"
	@$(BIN)/bywash run --ranks 4 --check --json out.json

# Tests of one process run two at a time; the others start ranks, which need the cores to themselves.
ALONE := $(addprefix tests/,balance doctor fabric fabric_config fabric_tune kernels planner routing)

test: setup      ## all tests that CI runs
	@$(BIN)/python -m pytest -q -m 'not slow' -n 2 --dist loadfile $(ALONE)
	@$(BIN)/python -m pytest -q -m 'not slow' $(addprefix --ignore=,$(ALONE)) tests

test-slow: setup ## the long sweeps
	@$(BIN)/python -m pytest -q -m slow --timeout 3600

lint: setup      ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:           ## remove what setup and the tests made
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis out.json
