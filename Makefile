# `make demo` and `make test` set up everything they need, inside this folder, on a machine that has Python and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

export MPLBACKEND ?= Agg

.PHONY: help demo test test-all lint docs bench clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      train, evaluate and show a model that writes dates"
	@echo "make test      run the tests, but for the slow ones"
	@echo "make test-all  run all tests"
	@echo "make lint      ruff, mypy, import directions"
	@echo "make docs      build the documentation into site/"
	@echo "make bench     measure, beside the alternatives"
	@echo "make clean     remove what was built, but for $(VENV)"

demo: $(VENV)/.installed
	$(BIN)/regard run dates

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py
	PYTHONPATH=docs $(BIN)/zensical build --strict --clean

bench: $(VENV)/.installed
	$(BIN)/regard bench

# A stamp is removed before the work and written after it, so that an install cut short is done again.
# A folder without a working pip is what an interrupted set-up leaves: it is made anew.
$(VENV)/.installed: pyproject.toml constraints.txt
	@rm -f $@
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@rm -f $@
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf build dist site out docs/mechanisms .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
