# The commands of this project; each installs what it needs into .venv first. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2
T      ?=
# Pure parts and contracts: at most 90 CPU seconds in all, once kernels are compiled.
U      := tests/unit
FAST   := $(U)/kernels $(U)/policies/test_policies.py $(U)/policies/test_popularity.py \
	$(addprefix $(U)/oracle/test_,assign.py lookahead.py oracle_kernels.py partition.py slots_and_window.py) \
	$(addprefix $(U)/store/test_,contract.py local.py memory.py) $(U)/trainer/test_stages.py \
	$(addprefix $(U)/test_,cache.py config.py docs.py initial.py layers.py layout.py metrics.py net.py optim.py \
	pooling.py reference.py schedules.py split.py types.py) \
	$(addprefix $(U)/data/,test_count.py prepare/test_cells.py prepare/test_texts.py)

.PHONY: help install train test fast net golden check format ecosystem house walk bench chaos clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 17

install: $(STAMP)  ## into .venv, with what development needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

train: install  ## train DLRM on generated data, about a minute
	$(BIN)/bagpipe train

test: install  ## all tests but the long ones; T=tests/unit/store for some of them
	$(PYTEST) -m 'not long' --durations=15 $(T)

fast: install  ## the tests to run while writing: pure parts and contracts, under a minute
	$(PYTEST) -m 'not long' -q $(FAST)

net: install  ## what must hold whatever the inside looks like: public names, exactness, faults
	$(PYTEST) -m 'not long' tests/net tests/exact tests/faults

golden: install  ## compare digests with the release at which the redesign began; PART=1 for what CI runs
	$(BIN)/python tests/golden/golden.py $(if $(PART),--part)

check: install  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ecosystem: install  ## docs/ecosystem.md anew: models of other libraries beside plain PyTorch, two minutes
	$(BIN)/python tests/ecosystem/page.py --write

house: install  ## sizes, layers and cycles of the package, and lines by part
	$(BIN)/python tools/house.py

walk: install  ## which files a batch visits, with one trainer and with two
	$(BIN)/python tools/walk.py
	$(BIN)/python tools/walk.py --trainers 2

bench: install  ## all benchmarks, with FBGEMM's kernels to compare with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[bench]'
	$(BIN)/bagpipe bench all

chaos: install  ## the long tests: many seeds, many kills, millions of lines; 25 times the examples of properties
	HYPOTHESIS_PROFILE=chaos $(PYTEST) -m 'hypothesis and not long' --timeout=1800 tests/exact tests/property tests/unit
	HYPOTHESIS_PROFILE=chaos $(BIN)/python -m pytest -m long

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
