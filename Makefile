# Everything runs from a fresh clone: a target makes .venv and installs the package first.
#
#   make demo       plan a small GPT, run it on two processes, compare with one
#   make test       all tests that need no GPU, in minutes
#   make test-all   also the large matrices and the long random runs
#   make lint       ruff and mypy --strict
#
# Variables: PYTHON (a Python >= 3.11), VENV, WORKERS (test processes).

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

bin := $(VENV)/bin
stamp := $(VENV)/.installed
# One thread per process: the tests start several processes at a time.
pytest = OMP_NUM_THREADS=1 $(bin)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: demo test test-all lint format install clean
.DEFAULT_GOAL := test

demo: $(stamp)
	$(bin)/autopar demo

test: $(stamp)
	$(pytest)

test-all: $(stamp)
	$(pytest) -m "large or not large" --hypothesis-profile=long

lint: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(stamp)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

install: $(stamp)

$(stamp): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python >= 3.11, '$(PYTHON)' is $$($(PYTHON) -V 2>&1); set PYTHON=..."; exit 1; }
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
