# make test    ruff, mypy and the quick tests
# make test-full    pyright, and every test that a CPU can run
# make emulator    every test of the kernels, on the CPU
# make mutations    plants mistakes and runs the quick tests that must notice them
# make agents    LangChain and openai-agents against the gateway; installs them
# make formats    plans in other formats before BehaviorTree.CPP and a PDDL validator; installs them
# make ros    the ROS 2 node with real rclpy and DDS, in .venv-ros (x86-64; cmake and g++)
# make demo    the small planner, built and run
# make eyes    planner-nano trained to see, as planner-nano-eyes was, on a GPU; PYTHON must have torch
# make twin    planner-nano trained without quantisation, on a GPU; PYTHON must have torch
# make quality    what quantising the twin costs (without make twin: a stand-in); half an hour
# make PYTHON=python3.12 test    with another interpreter (3.11 or later), if there is no .venv yet
# make clean    removes .venv, .venv-ros and what was built
#
# They set themselves up once (.venv, pinned packages) and need no network after that.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin

# The first of these that runs and is new enough; PYTHON=... overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# What is installed is named after what was asked for, so any change of it installs again, and
# nothing else does (a checkout touches files without changing them).
HASH := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c 1-16)
RUN_READY := $(VENV)/run-$(HASH)
DEV_READY := $(VENV)/dev-$(HASH)
# Without trt-test, the tests of tests/trt are skipped.
EXTRAS ?= build,ort,cuda,serve,http,images,dev,trt-test
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# pyright would ask the network whether there is a newer pyright.
PYRIGHT := PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
# Both workers and every process that a test starts read the compiled modules that one wrote.
PYTEST := PYTHONDONTWRITEBYTECODE= OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

test: $(DEV_READY)
	@echo "== ruff" && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== mypy" && $(BIN)/mypy
	@echo "== pytest" && $(PYTEST) -m "not slow and not emulator" --cpu-budget

test-full: $(DEV_READY)
	@echo "== pyright" && $(PYRIGHT)
	@echo "== pytest" && $(PYTEST)

emulator: $(DEV_READY)
	@$(PYTEST) tests/emulator tests/plugins

mutations: $(DEV_READY)
	@$(BIN)/python tests/mutations.py

agents: $(DEV_READY)
	@$(PIP) -q -e '.[agents]'
	@$(PYTEST) tests/serving/gateway/test_agents.py

formats: $(DEV_READY)
	@$(PIP) -q -e '.[formats]'
	@$(PYTEST) tests/serving/planner/test_format_judges.py

ros: $(DEV_READY)
	@tests/ros2/setup.sh .venv-ros $(BIN)/python
	@$(PYTEST) tests/ros2

demo: $(RUN_READY)
	@$(BIN)/thor-dflash demo

TWIN := build/twin
twin:
	@mkdir -p $(TWIN)/target && cd models/planner-nano/target && \
		cp tokenizer.json tokenizer_config.json chat_template.jinja $(CURDIR)/$(TWIN)/target
	@PYTHONPATH=. $(PYTHON) -m thor_dflash.calib.nano.train --no-quant --models $(TWIN) \
		--work build/nano-twin --start models/planner-nano/target --stage target export \
		drafter export eval --docs 150000 --rollouts 10240 --seconds 330 --held 240

quality: $(RUN_READY)
	@$(BIN)/python -m thor_dflash.calib.studies.quality --tasks 60 \
		$(if $(wildcard $(TWIN)/target/*.safetensors),--work build/quality-twin \
		--twin $(TWIN)/target --drafter $(TWIN)/drafter,--work build/quality)

# models/planner-nano-eyes was made so in two calls: calib/nano/README.md, "With pictures".
eyes:
	@mkdir -p build/eyes && cp -r models/planner-nano/target models/planner-nano/drafter build/eyes/
	@PYTHONPATH=. $(PYTHON) -m thor_dflash.calib.nano.train --eyes --models build/eyes --work build/nano-eyes \
		--start models/planner-nano/target --stage target export eval --begin 0.5 --docs 480000 \
		--rows 48 --anchors 16 --tower-seconds 40 --seconds 710 --drafter-seconds 75 --held 240

format: $(DEV_READY)
	@$(BIN)/ruff check -q --fix --exit-zero . && $(BIN)/ruff format .

$(RUN_READY): | interpreter $(VENV)/made
	@echo "== installing into $(VENV) (once)"
	@$(PIP) -q 'setuptools>=77'
	@$(PIP) --no-build-isolation -e '.[build,ort,images]'
	@rm -f $(VENV)/run-* && touch $@

$(DEV_READY): | interpreter $(VENV)/made
	@echo "== installing into $(VENV), with the tools of make test (once)"
	@$(PIP) -q 'setuptools>=77'
	@# Python compiles what is imported, a fifth of what pip would compile.
	@$(PIP) --no-build-isolation --no-compile -e '.[$(EXTRAS)]'
	@$(BIN)/python tests/stand_ins/trt_stubs.py
	@rm -f $(VENV)/run-* $(VENV)/dev-* && touch $(RUN_READY) $@

$(VENV)/made:
	@test -n "$(PYTHON)" || { echo "thor-dflash needs Python >= 3.11: install it and say" \
		"make PYTHON=python3.12 (got $$(python3 --version 2>&1))" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON must be >= 3.11 (got $(PYTHON))" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "thor-dflash needs venv: sudo apt install python3-venv" \
		"(or python3.X-venv for PYTHON=python3.X)" >&2; exit 2; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) && touch $@

# A .venv keeps the interpreter that it was made with.
interpreter:
ifneq ($(origin PYTHON),file)
	@test ! -e $(VENV)/made || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || { \
		echo "PYTHON must be that of $(VENV), $$($(BIN)/python -V) (got $(PYTHON))." \
		"For another one: make clean" >&2; exit 2; }
endif

clean:
	rm -rf $(VENV) .venv-ros build .mypy_cache .ruff_cache .pytest_cache *.egg-info

.PHONY: help test test-full emulator mutations agents formats ros demo twin eyes quality format \
	interpreter clean
