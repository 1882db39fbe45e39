# The commands of this project; each installs what it needs into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install train test check format bench chaos clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

train: install
	$(BIN)/bagpipe train

test: install  # all but what takes minutes, which chaos runs
	$(BIN)/python -m pytest -n 2 -m 'not long'

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  # with FBGEMM's kernels to compare with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[bench]'
	$(BIN)/bagpipe bench all

chaos: install
	$(BIN)/python -m pytest -m long

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
