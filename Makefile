# Everything a newcomer or a machine runs. `make help` lists it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# The stamp's name holds a sum of what was installed, so a changed file installs again and an untouched one never does.
STAMP  := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-engine test-runs test-planner test-services lint system-packages clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
	  while IFS="$$(printf '\t')" read -r target text; do printf '  make %-16s %s\n' "$$target" "$$text"; done
	@echo "  make setup PYTHON=python3.12 chooses the interpreter of a new $(VENV)."

setup: $(STAMP) ## make .venv and install the pinned packages (once)

# A missing interpreter or module is named here, with its remedy, instead of failing later in pip's words.
NEEDS = Install Python 3.11 or newer with its venv module, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)
define check-python
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) was not found. $(NEEDS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" --version 2>&1), too old. $(NEEDS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv). $(NEEDS)" >&2; exit 1; }
endef

# A copied or moved folder brings a .venv whose programs point to the old place; `activate` tells, and is made last.
$(STAMP):
	$(check-python)
	@grep -qsF "$(CURDIR)/$(VENV)" $(BIN)/activate || { \
	  echo "Making a virtual environment in $(VENV)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "Installing about 90 packages into $(VENV), torch and ray among them."
	@echo "It takes a minute or more and 2 GB of disk (8 GB where pip chooses a torch with CUDA libraries)."
	@echo "This is done once, and again only when pyproject.toml or constraints.txt changes."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: setup ## train a small model on emulated unlike devices
	$(BIN)/eth train examples/demo.yaml

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two at a time: many tests wait for processes that they started (ranks, Ray, servers), so that one part alone leaves a
# core idle much of the time. The longest part begins and the shortest ends: little is left to run alone.
PARTS = test-engine test-runs test-planner test-services
BOTH = $(MAKE) --no-print-directory --jobs=2 --output-sync=none

test: lint ## lint, then every test that is not marked slow
	@$(BOTH) $(PARTS)

test-slow: setup ## the tests marked slow
	@$(BOTH) $(PARTS) MARKED='-m slow'

test-engine: setup
	$(BIN)/python -m pytest $(MARKED) tests/engine

test-runs: setup
	$(BIN)/python -m pytest $(MARKED) tests/actors tests/e2e

test-planner: setup
	$(BIN)/python -m pytest $(MARKED) tests/planner

test-services: setup
	$(BIN)/python -m pytest $(MARKED) --ignore=tests/planner --ignore=tests/engine --ignore=tests/actors --ignore=tests/e2e

system-packages: ## chromium, for the browser tests (Debian or Ubuntu, as root)
	@if command -v chromium >/dev/null; then echo "chromium is installed: nothing to do."; \
	elif ! command -v apt-get >/dev/null; then \
	  echo "Not installed: chromium (there is no apt-get here). Without it the browser tests are skipped."; \
	elif [ "$$(id -u)" -ne 0 ]; then \
	  echo "Not installed: chromium (apt-get needs root). Without it the browser tests are skipped."; \
	else apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; fi

clean: ## remove .venv and every cache
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
