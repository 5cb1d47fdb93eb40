# Everything a newcomer needs, on a machine with git, make, Python 3.11 (or newer) and pip:
#   make demo    see it work        make test    check it        make help    the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
MANIFESTS := $(wildcard packages/*/pyproject.toml)

# The first Python that is new enough; `make setup PYTHON=…` names another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Tests start hundreds of processes that import torch: without bytecode kept from the first one each takes seconds more.
unexport PYTHONDONTWRITEBYTECODE

# Few workers, each with one thread: the machines this runs on are small, and torch would otherwise start a thread per core.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --maxprocesses=4 --dist=worksteal
# What was compiled for the installed package serves its wheel too.
OBJECTS := LAYERZERO_CPU_OBJECTS="$(CURDIR)/build/native"
FUZZ := $(PY) -W ignore -m tools.fuzz --iterations 100000 --minutes 15 --seed 2 --json build/check/fuzz.json

.PHONY: help demo test check lint format docs wheels release lock prove clean setup setup-run requirements tools wheelhouse sync

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# --- the commands -------------------------------------------------------------------------------------------------------------

demo: setup-run ## a tour on this machine; writes build/demo.html
	@mkdir -p build
	$(BIN)/lz demo --html build/demo.html

test: lint ## ruff and the short tests: about eight minutes on two cores from a fresh clone, four after that
	@mkdir -p build/junit && rm -f build/junit/*.xml
	$(PYTEST) -m short --junitxml=build/junit/short.xml

# `make check TESTED=yes` leaves out what the `make test` before it has shown. Types and fuzzing take one core each and run beside the tests.
check: $(if $(TESTED),setup,test) ## everything a change must pass: test, then import contracts, types, the longer tests, wheels, fuzzing, pages
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter
	@mkdir -p build/check && rm -f build/check/*.log
	setsid nice bash -c '$(BIN)/mypy --cache-dir build/mypy >build/check/types.log 2>&1 && $(FUZZ) >build/check/fuzz.log 2>&1' & beside=$$!; \
	trap 'kill -- "-$$beside" 2>/dev/null || true' EXIT; \
	$(PYTEST) -m check --junitxml=build/junit/check.xml; \
	$(MAKE) --no-print-directory wheels >build/check/wheels.log 2>&1 || { tail -n 50 build/check/wheels.log; exit 1; }; \
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/plugins tests/docs/test_site.py -m "slow or integration" --junitxml=build/junit/plugins.xml; \
	wait $$beside || { tail -n 50 build/check/types.log build/check/fuzz.log; exit 1; }; \
	tail -n 1 build/check/types.log; cut -d, -f1 build/check/fuzz.log
	$(PY) -m tools.check_docs
	$(PY) -m tools.house
	$(PY) -m tools.requirements

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## let ruff put the layout right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the documentation site in build/site/html, warnings as errors; links of all pages
	$(PY) -m tools.check_docs
	$(PY) -m tools.site

# RELEASE=yes: sdists too, the same bytes from the same commit, checked, with bill of materials and signed manifest (tools/release.py)
wheels: setup $(if $(RELEASE),build/venv-release/.stamp) ## wheels of all packages in dist/; RELEASE=yes: all files of a release
	rm -rf dist
	$(if $(RELEASE),LAYERZERO_REQUIRE=1 $(OBJECTS) $(PY) -m tools.release build --into dist,for package in $$($(PY) -m tools.workspace packages); do \
		$(OBJECTS) $(PY) -m build --wheel --no-isolation --outdir dist $$package; done)

# the same under its own name; FROM="ONE TWO" puts together what machines of two kinds built
ifdef FROM
release: setup build/venv-release/.stamp
	LAYERZERO_REQUIRE=1 $(PY) -m tools.release join $(FROM) --into dist
else
release:
	@$(MAKE) --no-print-directory wheels RELEASE=yes
endif

lock: setup ## constraints.txt, uv.lock and the two requirements files from the pyproject files
	$(PY) -m tools.lock

# an install without a network, docs/offline.md: all wheels in a folder, and on the other machine an environment from them alone
wheelhouse: wheels
	$(PY) -m tools.wheelhouse fill
sync:
	$(PYTHON) -m tools.wheelhouse sync --into $(VENV) $(ARGS)

prove: setup $(if $(filter tools,$(NAME)),tools) ## a long lane, `make prove NAME=stress`; without a name the list of them (tools/prove.toml)
	@$(PY) -m tools.prove $(NAME)

clean: ## everything made, the virtual environment too
	rm -rf $(VENV) .tox build dist wheelhouse .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# which requirement lines are shown, by section: by the tests of the last `make check`, and by kept runs of the long lanes
requirements: setup
	@$(PY) -m tools.requirements $(ARGS)

# --- set-up: plain venv and pip, versions pinned; native code is compiled beside it -----------------------------------------------
# Nothing is compiled to bytecode in advance: Python does that for the few modules that are imported. torch stands in the list as
# constraints.txt names it, so that a CPU build the machine offers is taken.

$(PY):
	@test -n "$(PYTHON)" || { echo "need Python 3.11 or newer with venv; none found (make setup PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	-$(PIP) install -qq --no-compile pip==26.2.1 # older ones take twice as long for what follows, but will do

# demo needs the packages and the libraries behind its last stop, text in and out
$(VENV)/.run-stamp: constraints.txt tools/workspace.py $(MANIFESTS) | $(PY)
	@echo "setting up $(VENV) with torch and the packages (a minute or two, once)"
	@mkdir -p build
	{ grep '^torch==' constraints.txt; $(PY) -m tools.workspace requirements run; } > build/requirements-run.txt
	$(PIP) install -qq --no-compile -c constraints.txt -r build/requirements-run.txt tokenizers tiktoken
	$(EDITABLE)
	@touch $@

$(VENV)/.dev-stamp: constraints.txt tools/workspace.py $(MANIFESTS) pyproject.toml | $(PY)
	@echo "setting up $(VENV) with torch, the packages and the tools (a few minutes, once)"
	@mkdir -p build
	{ grep '^torch==' constraints.txt; $(PY) -m tools.workspace requirements run; $(PY) -m tools.workspace requirements dev; } > build/requirements-dev.txt
	$(PIP) install -qq --no-compile -c constraints.txt -r build/requirements-dev.txt
	$(EDITABLE) $$($(PY) -m tools.workspace requirements bare)
	@touch $@ $(VENV)/.run-stamp

EDITABLE = LAYERZERO_CPU_LATER=1 $(PIP) install -qq --no-compile --no-deps --no-build-isolation $$($(PY) -m tools.workspace packages | sed 's/^/-e /')

# the two build programs import nothing of ours, so they need not wait for the packages; without a compiler both stay away
$(VENV)/.native-stamp: $(foreach package,cpu accel,$(wildcard packages/layerzero-$(package)/src/layerzero_$(package)/native/*) packages/layerzero-$(package)/src/layerzero_$(package)/build.py) | $(PY)
	-$(PY) -P packages/layerzero-accel/src/layerzero_accel/build.py --if-needed
	-$(PY) -P packages/layerzero-cpu/src/layerzero_cpu/build.py --if-needed --cache build/native
	@touch $@

# one unpacks while the other compiles
setup-run: | $(PY)
	@$(MAKE) --no-print-directory -j2 $(VENV)/.run-stamp $(VENV)/.native-stamp
setup: | $(PY)
	@$(MAKE) --no-print-directory -j2 $(VENV)/.dev-stamp $(VENV)/.native-stamp

# the programs that look at a release, apart from everything else
build/venv-release/.stamp: pyproject.toml | $(PY)
	$(PY) -m venv build/venv-release
	$(PY) -m tools.workspace requirements release > build/requirements-release.txt
	build/venv-release/bin/python -m pip --disable-pip-version-check install -qq -r build/requirements-release.txt
	@touch $@

# an environment of their own that sees what is in $(VENV); nothing of it is needed to build, test or run
TOOLS := build/venv-tools
tools: setup
	@$(MAKE) --no-print-directory $(TOOLS)/.stamp
$(TOOLS)/.stamp: $(VENV)/.dev-stamp pyproject.toml constraints.txt
	$(PY) -m venv $(TOOLS)
	$(PY) -m tools.workspace requirements tools > build/requirements-tools.txt
	$(PY) -c "import sys, sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > "$$($(TOOLS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/workspace.pth"
	$(TOOLS)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r build/requirements-tools.txt
	@touch $@
