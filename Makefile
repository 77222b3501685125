# `make demo` and `make test` set up everything they need; the rest is for people who change the code.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test unit e2e check proto clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

proto: setup ## regenerate contracts/pb from proto/
	$(BIN)/python -m tools.generate_proto
