# Everything is installed into $(VENV) and built under build_out/; nothing else is written to.
PYTHON ?= python3
VENV ?= .venv
MATRIX ?= default
STORE ?= build_out/kernels
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: help run test test-all kernels verify budgets budgets-update lint format wheel clean

help:
	@echo "make run       build a small set of kernels and validate it"
	@echo "make test      run the tests (test-all: the slow ones too)"
	@echo "make kernels   build the kernels of the set MATRIX ($(MATRIX)) into STORE ($(STORE))"
	@echo "make verify    build them, run each on the emulator, write build_out/verification.md"
	@echo "make budgets   compare the release kernels with budgets.json (budgets-update: write it)"
	@echo "make lint      ruff and mypy (format: let ruff rewrite)"
	@echo "make wheel     a wheel with the kernels of the set release"
	@echo "make clean     remove what these made"

# The stamp is made last: an installation that was interrupted is done again.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing the compiler and the tools into $(VENV); this takes a minute or two"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

kernels: $(READY)
	$(BIN)/mlakern build --set $(MATRIX) --jobs $(JOBS) --out $(STORE)

run: kernels
	$(BIN)/mlakern run --all --store $(STORE)

# Goes on where it was interrupted; kernels that have not changed are not run again.
verify: kernels
	$(BIN)/mlakern verify --set $(MATRIX) --store $(STORE) --jobs $(JOBS) --report build_out/verification.md

budgets: MATRIX = release
budgets: kernels
	$(BIN)/mlakern budgets --set release --store $(STORE)

budgets-update: MATRIX = release
budgets-update: kernels
	$(BIN)/mlakern budgets --set release --store $(STORE) --update

test: $(READY)
	$(BIN)/pytest -n 2 -m "not slow"

test-all: $(READY)
	$(BIN)/pytest -n 2

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(READY)
	$(BIN)/mlakern build --set release --jobs $(JOBS) --out mlakern/cubins
	$(BIN)/mlakern prune --store mlakern/cubins --yes
	rm -rf build  # modules that no longer exist would be packed as well
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build build_out dist mlakern/cubins mlakern.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find mlakern scripts tests -name __pycache__ -prune -exec rm -rf {} +
