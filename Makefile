# Every target is self-sufficient: the first one run makes a virtual environment and installs what constraints.txt pins.
# A stamp file makes the later ones quick. Another interpreter: `make PYTHON=python3.12 test`.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
DEMO_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

.PHONY: help install demo test lint types pytest long test-gpu test-ulfm check clean

help:
	@echo 'make demo    train a small GPT while three of its four replicas are killed; DEMO_ARGS="--text FILE" for other text'
	@echo 'make test    ruff, mypy and the tests'
	@echo 'make long    the long suite: what is marked slow'
	@echo 'make test-gpu   the tests that need a GPU; without one it says what is skipped'
	@echo 'make test-ulfm  what needs MPI, after installing it into the environment (the demo: DEMO_ARGS="--backend ulfm")'
	@echo 'make check   everything: make test, then make demo'
	@echo 'make clean   remove caches and results (not the environment)'

install: $(STAMP)

# torch first and by itself: installed together with the rest, the resolver may pick a build for a GPU that is not there.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, %s is %d.%d: make PYTHON=... says which" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py --out $(OUT) $(DEMO_ARGS)

test: lint types pytest

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy src

pytest: $(STAMP)
	$(BIN)/python -m pytest

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

test-ulfm: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ulfm]'
	$(BIN)/python -m pytest -k ulfm

long: $(STAMP)
	$(BIN)/python -m pytest -m slow

check: test
	$(MAKE) demo

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
