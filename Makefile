# Everything a fresh machine needs: `make quickstart`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The newest interpreter at hand, for `make test-newest`.
NEWEST ?= $(shell sh scripts/newest_python.sh)

.PHONY: quickstart learn test test-all test-newest lint clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m jaxrl_llm.train --config grpo_tiny.py

learn: $(VENV)/.installed
	$(BIN)/python benchmarks/learn.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" -q

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q

test-newest:
	@test -n "$(NEWEST)" || { echo "no Python 3.11 or newer found; set NEWEST=/path/to/python"; exit 1; }
	@echo "testing on $$($(NEWEST) --version)"
	$(MAKE) test PYTHON=$(NEWEST) VENV=.venv-newest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .venv-newest build dist *.egg-info
