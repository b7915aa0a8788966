# `make help` lists the targets. Everything runs inside .venv.

SHELL := /bin/bash
BIN := .venv/bin
WORKERS ?= 2
TYPED := src tests benchmarks scripts docs validation $(wildcard examples/*.py)
# Hypothesis draws the same examples each time under "ci"; see tests/conftest.py.
export HYPOTHESIS_PROFILE ?= ci

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-training demo-posttrain test check lint types imports names licenses unit test-slow fuzz format bench docs sizes \
	coverage clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.dev ## make .venv with everything a developer needs

demo: ## set up, then plan, calibrate, predict, run, compare and explain, in under three minutes
	@SECONDS=0; $(MAKE) -s --no-print-directory .venv/.train || { \
		echo "demo: torch cannot be installed here, so nothing is run" >&2; \
		$(MAKE) -s --no-print-directory .venv/.core; } && \
	DEMO_SETUP_S=$$SECONDS PATH="$(CURDIR)/$(BIN):$$PATH" python examples/demo.py

demo-training: .venv/.train ## set up, then train a small language model from scratch
	@PATH="$(CURDIR)/$(BIN):$$PATH" python examples/demo_training.py

demo-posttrain: .venv/.train ## set up, then teach a small model to sort by rewards alone, beside a placebo
	@PATH="$(CURDIR)/$(BIN):$$PATH" python examples/demo_posttrain.py

test: check unit docs ## set up, then lint, types, import and naming rules, tests, docs

check: lint types imports names licenses ## lint with security rules, types, import rules, naming rules, licences

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy $(TYPED)

imports: .venv/.dev
	$(BIN)/lint-imports --no-logo

names: .venv/.dev
	$(BIN)/python -m scripts.check_names

licenses: .venv/.dev
	$(BIN)/python -m scripts.check_licenses

unit: .venv/.dev
	$(BIN)/pytest -q -n $(WORKERS) -m "not slow"

test-slow: .venv/.dev ## the tests marked slow
	$(BIN)/pytest -q -m slow

fuzz: .venv/.dev ## the property tests with many more, random examples
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -q -n $(WORKERS) -m "not slow"

format: .venv/.dev ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev ## run benchmarks/, keep dated results, renew docs/numbers.md (ONLY=name, QUICK=1)
	@$(BIN)/python -m benchmarks.run $(ONLY) $(if $(QUICK),--quick); ran=$$?; \
		$(BIN)/python -m scripts.numbers_page && exit $$ran

docs: .venv/.dev ## build the site into docs/_build/html, warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -j $(WORKERS) -b html docs docs/_build/html

sizes: .venv/.dev ## lines per package, long modules, and what this change adds (BASE=commit)
	@$(BIN)/python -m scripts.sizes $(if $(BASE),--base $(BASE))

coverage: .venv/.dev ## tests, then which lines no test reached, as HTML in htmlcov/
	$(BIN)/pytest -q -n $(WORKERS) -m "not slow" --cov --cov-report=term-missing --cov-report=html

clean: ## remove everything that make can make again
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* coverage.xml htmlcov docs/_build build dist demo-out
	find src tests benchmarks scripts docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.core: pyproject.toml constraints.txt
	@scripts/setup.sh core

.venv/.train: pyproject.toml constraints.txt
	@scripts/setup.sh train

.venv/.dev: pyproject.toml constraints.txt
	@scripts/setup.sh dev
