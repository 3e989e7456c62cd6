# `make help-all` lists every target. `make demo` and `make test` need a Debian or Ubuntu with Python
# 3.11 or newer and nothing else: what is missing is installed first.

VENV ?= .venv
BIN = $(VENV)/bin

# Dozens of processes import the package and its tests; without bytecode, each compiles them anew.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
# The targets test-ROOM are not listed: make would not look for their pattern then, and do nothing.
.PHONY: help help-all demo test test-security test-rooms test-trouble test-browser test-spark unit test-brokers test-upgrade test-valkey without mutation chaos soak soak-short probe hostile fuzz registry-sequences registry-mutants planted schedule-sequences travel \
        bench bench-beside journeys lint types docs pictures tox coverage release-check clean

help:  ## List the targets that people need; `make help-all` lists the others too
	@grep -hE '^[a-z0-9%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9%-]+):.*## /\1\t/' | expand -t 20

help-all:  #: List all targets
	@grep -hE '^[a-z0-9%-]+:.*#[#:]' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9%-]+):.*#[#:] /\1\t/' | expand -t 20

$(VENV)/demo.done: pyproject.toml set_up.sh
	./set_up.sh $(VENV) demo

$(VENV)/test.done: pyproject.toml set_up.sh
	./set_up.sh $(VENV) test

$(VENV)/check.done: pyproject.toml set_up.sh
	./set_up.sh $(VENV) check

demo: $(VENV)/demo.done  ## The record shop: Spark, RabbitMQ, a worker that is killed (about a minute)
	$(BIN)/python -m example_project

# The rooms of the package; `whole` has the tests that look at all of them.
ROOMS = kernel registry schedules operations metrics spark testing web whole
UNIT = $(wildcard $(ROOMS:%=tests/%/unit))
INTEGRATION = $(wildcard $(patsubst %,tests/*/integration/test_%.py,$(1)))

# Brokers, workers and Redis servers that are killed or stop answering, and clusters.
TROUBLE_TESTS = tests/kernel/acceptance/test_kill.py $(call INTEGRATION,cluster early modules_trouble publisher_trouble \
        registry_kills registry_trouble)

# The page in a real browser, also while its servers are killed.
BROWSER_TESTS = $(call INTEGRATION,web_browser*)

# What strangers, other users and other versions may do, and TLS.
SECURITY_TESTS = tests/upgrade/test_recorded.py $(call INTEGRATION,dangerous_bodies hostile modules_bounds permissions \
        reach sealed secrets signing tls versions)

# The tests of rooms against real servers, without the two kinds that take long.
OF_ROOMS = $(filter-out $(TROUBLE_TESTS) $(BROWSER_TESTS), \
        $(wildcard $(foreach room,$(1),tests/$(room)/acceptance/test_*.py tests/$(room)/integration/test_*.py)))

# One test of each of these rooms.
SMOKE_TESTS = tests/schedules/integration/test_schedules.py::test_each_instant_runs_once_and_edits_and_deletes_end_what_waits \
        tests/testing/integration/test_travel.py::test_all_ways_to_send_travel \
        tests/spark/integration/test_spark_write.py::test_rows_become_tasks_that_run_when_they_are_due \
        tests/operations/integration/test_undeliverable.py::test_messages_come_to_their_queue_and_the_others_stay \
        tests/metrics/integration/test_metrics.py::test_each_verdict_of_the_registry_is_counted \
        tests/web/integration/test_web.py::test_an_action_does_what_it_says_for_each_task_and_is_logged

# How many processes test at the same time; most tests wait most of the time.
PROCESSES ?= 4

# Files in their order: unit tests, of which each file is quick, come last and fill the gaps.
AT_ONCE = --dist=loadfile --no-loadscope-reorder --numprocesses

TEST = -m pytest $(AT_ONCE)=$(PROCESSES) $(SMOKE_TESTS) $(filter-out $(SECURITY_TESTS), $(call OF_ROOMS,kernel registry)) \
        $(filter-out %_pipelines.py, $(wildcard example_project/tests/test_*.py)) $(UNIT)

test: $(VENV)/test.done  ## The tests of the kernel and the registry, all unit tests, and one test of each other room
	$(BIN)/python $(TEST)

coverage: $(VENV)/test.done  ## The tests of make test, and which lines they reach (half as long again)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(TEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-security: $(VENV)/test.done  #: The tests of permissions, allow-lists, signatures, bounds, secrets, TLS and versions
	$(BIN)/pytest $(AT_ONCE)=$(PROCESSES) $(SECURITY_TESTS)

test-rooms: $(VENV)/test.done  #: The tests of ROOMS against real servers: make test-rooms ROOMS="web operations"
	$(BIN)/pytest $(AT_ONCE)=$(PROCESSES) $(call OF_ROOMS,$(ROOMS))

test-%: $(VENV)/test.done  ## All tests of one room: test-kernel, -registry, -schedules, -operations, -metrics, -spark, -testing, -web
	$(BIN)/pytest $(AT_ONCE)=$(PROCESSES) $(call OF_ROOMS,$*) $(wildcard tests/$*/unit)

test-trouble: $(VENV)/test.done  #: The tests whose servers are killed, freeze or are full (ten minutes)
	$(BIN)/pytest $(AT_ONCE)=$(PROCESSES) $(TROUBLE_TESTS)

test-browser: $(VENV)/test.done  #: The tests of the page in a real browser (six minutes)
	$(BIN)/pytest $(AT_ONCE)=2 $(BROWSER_TESTS)

test-spark: $(VENV)/test.done  #: The tests that start Spark
	$(BIN)/pytest $(AT_ONCE)=2 example_project/tests/test_pipelines.py $(call OF_ROOMS,spark) tests/spark/unit

unit: $(VENV)/test.done  ## The tests that need no server
	$(BIN)/pytest $(AT_ONCE)=2 $(UNIT)

test-brokers: $(VENV)/test.done  #: Integration and acceptance tests on RabbitMQ 3.10, 4.0 and 4.3 (root)
	$(BIN)/python -m tests.brokers

test-upgrade: $(VENV)/test.done  #: The previous version, from git, and this one on the same levels: 20,000 tasks
	$(BIN)/python -m tests.upgrade.beside

test-valkey: $(VENV)/test.done  #: The registry's tests against Valkey in place of Redis (root)
	$(BIN)/python -m tests.valkey

registry-sequences: $(VENV)/test.done  #: 50,000 random sequences: the registry's scripts beside its rule; and each interleaving, deeper
	RABBITDELAY_SEQUENCES=50000 $(BIN)/pytest -q tests/registry/integration/test_registry_rule.py
	RABBITDELAY_DEPTH=6 $(BIN)/pytest -q tests/registry/unit/test_registry_rule.py

schedule-sequences: $(VENV)/test.done  #: 50,000 random sequences: the scripts of schedules beside their rule; and each interleaving, deeper (20 minutes)
	RABBITDELAY_SEQUENCES=50000 $(BIN)/pytest -q tests/schedules/integration/test_schedule_sequences.py
	RABBITDELAY_DEPTH=2 $(BIN)/pytest -q tests/schedules/unit/test_schedule_rule.py

travel: $(VENV)/test.done  #: Time travel: a year of forty schedules, and 200 sequences of calls on the real and the recorded system (an hour)
	RABBITDELAY_WHOLE_YEAR=1 $(BIN)/pytest -q tests/schedules/integration/test_schedule_year.py tests/schedules/unit/test_recurrence.py
	RABBITDELAY_SEQUENCES=200 $(BIN)/pytest -q --timeout=3600 tests/testing/integration/test_recorded_sequences.py

registry-mutants: $(VENV)/test.done  #: Break each line of the registry's scripts once; its tests have to notice
	$(BIN)/python -m tests.mutation.scripts

without: $(VENV)/test.done  ## Delete a ROOM and the rooms that need it in a copy, and test the rest: make without ROOM=web
	$(BIN)/python -m tests.without $(ROOM)

planted: $(VENV)/test.done  ## Break each promise once; the tests have to notice (half an hour)
	$(BIN)/python -m tests.planted

mutation: $(VENV)/test.done  #: Break the pure files in random places; the unit tests have to notice
	$(BIN)/python -m tests.mutation

chaos: $(VENV)/test.done  #: Every kind of trouble alone, on clusters of RabbitMQ 4.3: report lost, early and late tasks (hours, root)
	$(BIN)/python -m tests.chaos all

# The seed of the faults: the same seed draws the same ones at the same times.
SEED ?= 1

soak: $(VENV)/test.done  #: A million tasks of all kinds, while a SEED draws all kinds of faults; nothing may be lost or early (two hours, root)
	$(BIN)/python -m tests.chaos soak --seed $(SEED) --tasks 1000000 --minutes 120 --workers 6 --producers 3 --schedules 100 --spark 10

soak-short: $(VENV)/test.done  ## The same with 20,000 tasks: a cluster, and all kinds of faults (a quarter of an hour; networks need root): make soak-short SEED=7
	$(BIN)/python -m tests.chaos soak --seed $(SEED) --tasks 20000 --minutes 10

probe: $(VENV)/test.done  #: Probes once a minute in each kind of trouble, and a week's rounds without trouble (half an hour)
	RABBITDELAY_PROBE_INTERVAL=60 $(BIN)/pytest --numprocesses=4 tests/metrics/integration/test_probe.py -k trouble
	RABBITDELAY_PROBE_ROUNDS=10080 $(BIN)/pytest tests/metrics/integration/test_probe.py -k sound

hostile: $(VENV)/test.done  #: Malformed, oversized and forged messages against one worker after another (ten minutes)
	$(BIN)/python -m tests.hostile --seconds 600

fuzz: $(VENV)/test.done  #: Fuzz the parsers of untrusted input, guided by coverage (ten minutes)
	nice -n 10 $(BIN)/python -m tests.fuzz --seconds 600

# One or several of the benchmarks that `python -m tests.benchmarks list` prints.
NAME ?= list

bench: $(VENV)/test.done  ## Benchmarks beside peers: `make bench NAME=sends`; without a name, their list
	$(BIN)/python -m tests.benchmarks $(NAME)

bench-beside: $(VENV)/test.done  #: Benchmark modules and sends of the previous version and of this one, also with signing
	$(BIN)/python -m tests.benchmarks beside --name modules --signing
	$(BIN)/python -m tests.benchmarks beside --name sends --signing --turns 1

journeys: $(VENV)/test.done  #: Count the functions that one send, one write and one message in distribution call
	$(BIN)/python tests/benchmarks/journeys.py

lint: $(VENV)/check.done  ## ruff, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/check.done  ## mypy --strict
	$(BIN)/mypy

docs: $(VENV)/check.done  ## The documentation, as HTML, in docs/_build
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

pictures: $(VENV)/test.done  #: The pictures of the levels and of the page; those of benchmarks: build/benchmarks
	$(BIN)/python docs/explanation/pictures/levels.py
	PYTHONPATH=. $(BIN)/python docs/how-to/pictures/page.py

tox: $(VENV)/check.done  #: Unit and integration tests on Celery 5.5, 5.6 and 5.7; lint, types, docs
	$(BIN)/tox

release-check: $(VENV)/test.done  #: What a release would publish, built twice and tested on each Python; lowest versions, types, licenses, SBOM (half an hour)
	$(BIN)/python -m tests.release

clean:  ## Remove what the other targets have made
	rm -rf $(VENV) .tox build/release docs/_build .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
