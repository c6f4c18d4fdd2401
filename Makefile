# `make demo` runs the main job, `make test` the tests; both make their own .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   ?= demo-output
LONG   ?= tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-all test-soak lint format bench docs clean

help:  ## what one can make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train, evaluate and prove a model on the built-in dates (about 3 minutes)
	$(BIN)/isoform demo --output $(DEMO)

test: $(READY)  ## the tests (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -m 'not long and not soak' -n auto --dist worksteal -q

test-long: $(READY)  ## the long parity and property grids
	$(BIN)/python -m pytest -m long -n auto --dist worksteal -q $(LONG)

test-all: test test-long  ## both

test-soak: $(READY)  ## what takes minutes for one answer: lines of the code changed one by one, compilers
	$(BIN)/python -m pytest -m soak -n auto --dist worksteal -q

lint: $(READY)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measurements, side by side with peers (--quick: ARGS=--quick)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(READY)  ## regenerate the pages made from the code: configuration, chapter, visibility
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_chapter.py
	$(BIN)/python docs/generate_visibility.py

clean:  ## remove what make made
	rm -rf $(VENV) $(DEMO) .pytest_cache .ruff_cache
