# The few verbs of this repository. Each sets up what it needs.
PY := .venv/bin/python
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: ## make .venv ready for running
	@scripts/setup.sh run

dev: ## make .venv ready for the checks and tests
	@scripts/setup.sh dev

demo: setup ## the main job: Atlas handles two tickets, one of them hostile
	@$(PY) -m lockgate demo

check: dev ## lint, types, import rules, generated code, docs
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pyright
	.venv/bin/lint-imports
	$(PY) scripts/unasync.py --check
	$(PY) scripts/check_docs.py
	$(PY) scripts/check_spec.py
	.venv/bin/zensical build --clean --strict

test: dev ## every test, in parallel where that is safe
	@scripts/browser-deps.sh || echo "note: going on without a browser: the tests that open one will be skipped" >&2
	.venv/bin/pytest -n 2 -m "not serial"
	.venv/bin/pytest -m serial

test-kvm: dev ## the microvm rung on this host's KVM, which must boot a stock kernel: tests, attack suite and figures
	$(PY) -m lockgate microvm build --accel kvm --kernel .venv/microvm-kernel/*.deb --store .venv/microvm-kvm
	$(PY) -m lockgate microvm check --store .venv/microvm-kvm
	.venv/bin/pytest --kvm -n 2 tests/integration/test_microvm_machines.py tests/security/escape/test_microvm_wall.py
	.venv/bin/pytest --kvm tests/integration/test_conformance.py -k microvm
	$(PY) bench/microvm.py .venv/microvm-kvm

attack: dev ## what can be reached in the sandbox, beside what the same probes reach without one
	@$(PY) -m lockgate attack

browser: dev ## what a real browser fetches when rendered output is shown; gets the browser first
	@scripts/browser-deps.sh
	.venv/bin/pytest tests/browser

fuzz: dev ## ten minutes of coverage-guided fuzzing over every target
	@$(PY) tests/fuzz/campaign.py --seconds 600

soak: dev ## 20,000 mixed runs, broker and supervisor killed at random moments; then count what is left
	@$(PY) tests/soak.py --runs 20000

bench: dev ## the figures, as ratios in one run; writes bench/results.json
	@$(PY) bench/run.py

docs: dev ## build the site into site/
	.venv/bin/zensical build --clean --strict

clean: ## remove what the other verbs made
	rm -rf .venv .cache site .atlas .ruff_cache .hypothesis bench/results.json

.PHONY: help setup dev demo check test test-kvm attack browser fuzz soak bench docs clean
