# make demo   set up .venv and run the main job end to end       (ARGS="--turns 3 --json out.json")
# make test   the test suite (sets up too)                        (ARGS="tests/core -k radix")
# make soak   faults for half an hour, real daemons         (ARGS="--seed 3 --json DIRECTORY")
# make screenshots   the pictures of kvd-tui, of real daemons under load  (ARGS="--seconds 20")
# make check  ruff, mypy --strict, make test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test soak screenshots lint types check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[demo,test,dev]'
	touch $@

demo: setup
	$(BIN)/kvd demo $(ARGS)

# Two at a time: most tests wait for processes, not for the processor.
test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

soak: setup
	$(BIN)/python -m tests.fault.soak $(ARGS)

screenshots: setup
	$(BIN)/python -m tests.tui.pictures $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy --strict kvd tui benchmarks

check: lint types test

clean:
	rm -rf $(VENV)
