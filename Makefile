# Everything is run from the repository root. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv/bin
QUICK := not gpu and not slow and not system and not long
BUF := npm exec --yes --package=@bufbuild/buf@1.75.0 -- buf

.DEFAULT_GOAL := help
.PHONY: help setup protos golden check test test-system demo up bench exactness acceptance simulate

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv with everything that the other targets need
	@$(PYTHON) deploy/setup.py dev

demo: ## start the stack, stream real text, compare with plain decoding
	@$(PYTHON) deploy/setup.py run
	@$(VENV)/python -m bench.demo

up: ## start the stack on this machine and leave it running until Ctrl-C
	@$(PYTHON) deploy/setup.py run
	@$(VENV)/python -m hedgerow.cli up

test: setup ## the tests that need no GPU and no cluster, and a minute of exactness
	@echo "test: the suites, about 10 minutes on two cores"
	@$(VENV)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$(QUICK)" tests || { \
	  echo "test: what failed beside others, once more and alone: leases and time-outs need a core when they run out"; \
	  $(VENV)/python -m pytest -q --lf --lfnf=none -m "$(QUICK)" tests; }
	@echo "test: a rotating slice of the exactness run, at most a minute"
	@$(VENV)/python -m bench.exactness slice --seconds 60

test-system: setup ## images, chart, a cluster with streams in flight, and the long ones of the other suites; what is not installed is skipped by name
	@$(VENV)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "long and not slow" $(ARGS) tests || { \
	  echo "test-system: what failed beside others, once more and alone"; \
	  $(VENV)/python -m pytest -q --lf --lfnf=none -m "long and not slow" tests; }
	@$(VENV)/python -m pytest -q -m "system and not slow" $(ARGS) tests/system || { \
	  echo "test-system: what failed, once more: a cluster beside other work misses moments"; \
	  $(VENV)/python -m pytest -q --lf --lfnf=none -m "system and not slow" tests/system; }

check: setup ## formatting, lint, types, import directions, protos, generated code
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .
	@$(VENV)/mypy
	@$(VENV)/lint-imports
	@cd protos && $(BUF) lint && $(BUF) breaking --against released.binpb
	@$(PYTHON) deploy/generate.py --check
	@$(VENV)/python deploy/k8s/generate.py --check

golden: setup ## write the reviewed renders of the chart anew; helm on PATH; then read the difference
	@$(VENV)/python -m tests.system.golden

protos: ## regenerate hedgerow/v1 from protos/
	@$(PYTHON) deploy/generate.py

exactness: setup ## the exactness run of docs/claims.md, a process a core; stops and resumes
	@$(VENV)/python -m bench.exactness run $(ARGS)
	@$(VENV)/python -m bench.exactness summary

simulate: setup ## 100,000 simulated schedules of faults, checked; stops and resumes; ARGS="--replay SEED" shows one
	@$(VENV)/python -m bench.simulate $(ARGS)

acceptance: setup ## tokens per step on held-out prompts
	@$(VENV)/python -m bench.acceptance $(ARGS)

bench: setup ## speed, overhead and start-up of the whole stack on this machine
	@$(VENV)/python -m bench.serving $(ARGS)
