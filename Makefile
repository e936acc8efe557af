# make demo   set up .venv and run the main job end to end       (ARGS="--turns 3 --json out.json")
# make demo-vllm   the same with real vLLM on the CPU; sets up .venv-vllm (3.6 GB)    (ARGS=--stay)
# make test   the test suite (sets up too)                        (ARGS="tests/core -k radix")
# make test-fast   core, wire, configuration, property: under a minute
# make test-install   the wheel in bare environments; needs the registry, takes minutes
# make setup-vllm   .venv-vllm, of the newest vLLM that runs       (VLLM="0.32.0 0.27.1": of these)
# make test-engines   vLLM itself through real daemons: the newest, and the oldest of the same torch
# make test-install-vllm   the wheel beside vLLM, in build/vllm (4 GB)
# make soak   faults for half an hour, real daemons         (ARGS="--seed 3 --json DIRECTORY")
# make bench-compare BASE=REVISION   another checkout and this one, in turns  (ARGS="--rounds 3 --json out.json")
# make screenshots   the pictures of kvd-tui, of real daemons under load  (ARGS="--seconds 20")
# make docs   the documentation as a site in build/docs, every warning an error; make docs-serve shows it
# make man    the manual pages, in build/man
# make check  ruff, mypy --strict, make docs, make man, make check-compiled, make check-install, make test
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
BIN    := $(VENV)/bin
# Of an environment with vLLM: the one that was named, or the one that setup-vllm makes.
VLLM_PYTHON = $(or $(KVD_VLLM_PYTHON),$(wildcard $(CURDIR)/.venv-vllm/bin/python))
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: setup setup-vllm demo demo-vllm test test-fast test-compiled check-compiled test-install check-install test-install-vllm test-engines wheel wheel-pure soak bench-compare screenshots lint types docs docs-serve man check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[demo,console,proxy,test,dev,docs]'
	touch $@

demo: setup
	$(BIN)/kvd demo $(ARGS)

# Says what it does, how large it is, and what to do if it cannot; nothing where it is done.
setup-vllm:
	@for version in $(or $(VLLM),''); do \
		VLLM=$$version PYTHON=$(PYTHON) examples/vllm-pair/setup.sh || exit 1; done

demo-vllm: setup setup-vllm
	@KVD_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python examples/vllm-pair/demo.py $(ARGS)

# Two at a time: most tests wait for processes, not for the processor.
test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

# What a change of the core breaks first.
test-fast: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/core tests/wire tests/config tests/property $(ARGS)

soak: setup
	$(BIN)/python -m tests.fault.soak $(ARGS)

# BASE is a revision or a directory; exits with 0 whatever it finds, unless ARGS has --fail-above.
bench-compare: setup
	$(BIN)/python -m benchmarks compare $(BASE) $(ARGS)

screenshots: setup
	$(BIN)/python -m tests.tui.pictures $(ARGS)

# What is installed: dist/kvd-*-linux_*.whl, compiled; needs a C compiler, and what setup has installed.
wheel: setup
	rm -f dist/kvd-*-linux_*.whl
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/python -m build --no-isolation -o dist

# The same without compiled code, for any platform: dist/kvd-*-none-any.whl.
wheel-pure: setup
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build -o dist

# What an environment lacks is said before anything starts, and how to make one. By an interpreter
# that KVD_VLLM_PYTHON names, with that alone.
test-engines: setup
	$(BIN)/python -m tests.engines.versions $(VLLM) --pytest="$(ARGS)"

# kvd as the wheel has it, in a place of its own: no compiled module comes into this checkout.
test-compiled: wheel
	rm -rf build/compiled
	$(PIP) --no-index --no-deps --target build/compiled dist/kvd-*-linux_*.whl
	cp -r tests benchmarks pyproject.toml SECURITY.md build/compiled
	cd build/compiled && PYTHONPATH=. $(CURDIR)/$(BIN)/python -m pytest -q -n 2 --dist loadfile \
		tests/core tests/property tests/wire tests/model tests/sim tests/zmtp tests/observe \
		tests/security tests/daemon/test_client_port.py tests/daemon/test_reactor.py $(ARGS)

# Looks for the compiler and the headers of Python before anything is built: where they are, all that
# can fail is ours, because the build asks no registry.
check-compiled: setup
	@if echo '#include <Python.h>' | $${CC:-cc} -fsyntax-only -x c -I"$$($(BIN)/python -c \
		'import sysconfig; print(sysconfig.get_path("include"))')" - 2>/dev/null; \
	then $(MAKE) test-compiled; \
	else echo "make check: LEFT OUT make test-compiled: no C compiler, or no headers of Python, here"; fi

# Named, for neither is collected with the suite. Each Python 3.11 to 3.13 on the path has a turn.
test-install: setup
	$(BIN)/python -m pytest -q --timeout 600 tests/packaging/installs.py $(ARGS)

# The smallest package that kvd asks for stands for the registry.
check-install: setup
	@if $(BIN)/python -m pip download -q --no-deps --no-cache-dir --disable-pip-version-check --timeout 10 \
		--retries 0 -d build/registry mypy_extensions >/dev/null 2>&1; \
	then $(MAKE) test-install; \
	else echo "make check: LEFT OUT make test-install: the package registry is not reached from here"; fi

test-install-vllm: setup
	$(BIN)/python -m pytest -q --timeout 600 tests/packaging/beside_vllm.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy --strict kvd tui benchmarks

# Everything is read anew: the reference is made from modules that Sphinx does not watch.
docs: setup
	$(BIN)/sphinx-build -q -E -a -n -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs $(PORT)

man: setup
	$(BIN)/sphinx-build -q -E -a -W --keep-going -b man -d build/man/.doctrees docs build/man

check: lint types docs man check-compiled check-install test

clean:
	rm -rf $(VENV) build
