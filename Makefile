# Everything goes through .venv, which is made from requirements/cpu.lock.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.forge-stamp
MARKER := $(VENV)/.forge-installing
LOCK := requirements/cpu.lock
# Errors only: pip warns about every index that lacks a distribution which another one has.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
PYTEST_ARGS ?=
DEMO_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow lint format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 12

env: $(STAMP) ## make the environment in .venv from the lock file

# The marker says that an install began, the stamp that it ended. After an interrupted one (it may have left half
# a distribution behind), and for a venv whose Python is gone or too old, the venv is made anew.
$(STAMP): $(LOCK) pyproject.toml
	@test -n "$(PYTHON)" || { echo "make env: no python3 found; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || \
		{ echo "make env: $(PYTHON) is older than Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test ! -e $(MARKER) && "$(BIN)/python" -c 'import sys, pip; sys.exit(sys.version_info[:2] < (3, 11))' \
		>/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@touch $(MARKER)
	@echo "make env: installing $$(grep -c == $(LOCK)) distributions into $(VENV); the first time takes minutes"
	@$(PIP) install --no-deps -r $(LOCK)
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $(STAMP) && rm -f $(MARKER)

demo: env ## train the tiny policy on this machine's CPU (configs/cpu.toml)
	$(BIN)/python -m apps.grpo_composer --config configs/cpu.toml $(DEMO_ARGS)

test: env ## the default test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: env ## the slow tests, which CI runs too
	$(BIN)/python -m pytest -m "slow and not gpu and not browser" $(PYTEST_ARGS)

lint: env ## ruff (rules and format) and mypy --strict
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: env ## put the code in ruff's format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

lock: ## remake requirements/cpu.lock from cpu.in (uses uv)
	PYTHON="$(PYTHON)" bash scripts/lock.sh

clean: ## remove the environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
