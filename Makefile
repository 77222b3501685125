# `make demo` and `make test` set up everything they need; the rest is for people who change the code.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
RUN ?= examples/demo.toml
SET ?=

# Two cores are shared by many processes: one thread each is faster than several that wait.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup browser demo test unit e2e test-sglang test-agents check format proto warmstart stability-warmstart results results-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | column -t -s '|'

setup: ## virtual environment, pinned dependencies, bubblewrap
	@PYTHON="$(PYTHON)" bash tools/setup.sh

demo: setup ## train the demo policy on eight sampler groups; ends with runs/demo/report.html
	$(BIN)/python -m trainer_jax train $(RUN) --fresh $(addprefix --set ,$(SET))

test: setup check unit e2e ## everything that must hold

unit: setup browser ## fast tests, no processes of the run
	$(BIN)/python -m pytest -n 2 -m "not e2e" tests

e2e: setup ## real processes and real gRPC on loopback, one test at a time
	$(BIN)/python -m pytest -m e2e tests

browser: ## Chromium, for the tests of the gateway's page
	@bash tools/browser.sh

test-sglang: setup ## the engine port against a real SGLang server on this CPU
	@python="$$(PYTHON="$(PYTHON)" bash tools/sglang_env.sh)" && \
		SGLANG_PYTHON="$$python" $(BIN)/python -m pytest --timeout 600 tests/sglang

test-agents: setup ## the OpenAI endpoint under the real mini-swe-agent
	@python="$$(PYTHON="$(PYTHON)" bash tools/agents_env.sh)" && MINI_SWE_AGENT_PYTHON="$$python" \
		$(BIN)/python -m pytest tests/sampler_fleet/openai/test_mini_swe_agent.py

check: setup results-check ## lint, types, layout, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.check_layout
	$(BIN)/python -m tools.generate_proto --check
	$(BIN)/basedpyright --warnings

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## regenerate contracts/pb from proto/
	$(BIN)/python -m tools.generate_proto

warmstart: setup ## reproduce examples/demo-checkpoint from the repository alone
	$(BIN)/python -m sampler_fleet tokenizer --out build/warmstart/tokenizer
	$(BIN)/python -m sampler_fleet demonstrations --tokenizer build/warmstart/tokenizer \
		--num 64000 --seed 1 --out build/warmstart/demonstrations.npz
	$(BIN)/python -m trainer_jax sft examples/warmstart.toml
	rm -rf examples/demo-checkpoint
	cp -r build/warmstart/checkpoint examples/demo-checkpoint

stability-warmstart: setup ## reproduce examples/stability/warm-start-* from the repository alone
	for seed in 0 1; do \
		$(BIN)/python -m sampler_fleet demonstrations --environment grid --num 12000 --seed $$seed \
			--tokenizer examples/demo-checkpoint --out build/stability/demonstrations.npz && \
		$(BIN)/python -m trainer_jax sft examples/stability/warmstart.toml --set sft.seed=$$seed \
			--set sft.out=examples/stability/warm-start-$$seed || exit 1; \
	done

results: setup ## the report of docs/results/stability, from the runs that are finished
	$(BIN)/python -m tools.stability_report docs/results/stability

results-check: setup ## whether that report is what its runs give
	$(BIN)/python -m tools.stability_report docs/results/stability --check

clean: ## remove the environment, caches and runs
	rm -rf .venv .cache runs build *.egg-info
