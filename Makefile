# make demo    a first job, from nothing to its results
# make test    the whole suite
# make lint    ruff, mypy, generated docs, the ten largest files
# make venv    .venv with the project and the tools to work on it

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
PYTEST_ARGS ?= -n 2 --dist loadfile
SOURCES := ntx_batch jobs engine kernels nvme scripts tests

.DEFAULT_GOAL := help
.PHONY: help demo test lint venv clean

help:
	@sed -n 's/^# //p' Makefile

# The stamps keep pip from running again until pyproject.toml changes.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), 700 MB; this takes a minute"
	$(PIP) install --no-compile -e .
	@touch $@

$(DEVELOPED): pyproject.toml | $(INSTALLED)
	$(PIP) install -e ".[dev]"
	@touch $@

venv: $(DEVELOPED)

demo: $(INSTALLED)
	@$(BIN)/python -m scripts.demo

test: $(DEVELOPED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m scripts.docs --check
	@echo "The ten largest files, in lines:"
	@git ls-files -- $(addsuffix /*.py,$(SOURCES)) | xargs wc -l | grep -v ' total$$' | sort -rn | head -10

clean:
	rm -rf demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
