# Everything a person runs here. Only relative paths, because make splits names at spaces and the
# folder this lies in may have some.
#
#   make demo ARGS="--volunteers 6 --stages 3"     make test ARGS="tests/shared -k invite"

PY := .venv/bin/python
# Extra arguments for demo, test and bench.
ARGS ?=
# Tests of two files at a time: most wait for something now and then, and two cores are enough.
TWO = -n 2 --dist loadfile

.PHONY: help setup setup-dev demo test test-runs test-attacks test-durability test-faults test-nat \
        test-installers fuzz \
        check format docs bench bench-faults bench-net bench-wan bench-wan-timeline bench-all-reduce \
        bench-simulator bench-rebalancing \
        bench-coordinator bench-prediction bench-views bench-yielding bench-codecs bench-quality \
        bench-lateness bench-bottlenecks bench-agreement \
        bench-counts bench-bytes bench-copies bench-gpu clean

help:
	@echo "make setup    virtual environment and packages into .venv"
	@echo "make demo     train a small model across processes of this machine (ARGS=\"--volunteers 4 --stages 2\")"
	@echo "make test     unit and integration tests (ARGS are pytest's)"
	@echo "make test-runs whole runs under churn, minutes each"
	@echo "make test-nat tests on real network stacks behind NAT; needs root, and sh tools/install_network_lab.sh"
	@echo "make test-attacks attackers against a run, the dashboard in Chromium (sh tools/install_chromium.sh), other slow tests"
	@echo "make test-durability coordinators killed at every commit, and standbys on PostgreSQL"
	@echo "make test-faults injected faults: a table of them, random ones, a lost stage"
	@echo "make test-installers the installers, run for real; needs sh tools/install_installer_tools.sh"
	@echo "make fuzz     decoders under atheris for longer (ARGS=\"--seconds 600 muxer\")"
	@echo "make check    formatting, lint, strict types, import contracts"
	@echo "make format   apply the formatting"
	@echo "make docs     write the pages made from the code: docs/commands.md, docs/preferences.md"
	@echo "make bench    measure throughput, side by side with torch alone (ARGS=\"--repetitions 1\")"
	@echo "make bench-faults measure what killed, frozen and leaving peers cost"
	@echo "make bench-net measure links behind NAT; needs what test-nat needs"
	@echo "make bench-wan train over emulated home links, compared with torch and hivemind; needs what test-nat needs"
	@echo "make bench-wan-timeline how each machine spends the seconds of a step over such links"
	@echo "make bench-all-reduce the all-reduce of a stage over such links, compared with its bound"
	@echo "make bench-simulator measure how the simulator and placement grow with the fleet"
	@echo "make bench-rebalancing compare rules of moving peers (ARGS=\"FOLDER_OF_RECORDINGS\")"
	@echo "make bench-coordinator thousands of simulated volunteers at the real coordinator"
	@echo "make bench-prediction the simulator's prediction compared with real, throttled processes"
	@echo "make bench-views start time and load of the terminal views"
	@echo "make bench-yielding seconds until a machine is free after a key press of its user"
	@echo "make bench-counts bytes of messages and instructions of small work, against the baseline"
	@echo "make bench-bytes bytes on the wire of a real run, over the tensors in it"
	@echo "make bench-copies copies of a tensor's bytes per hop; needs a C compiler"
	@echo "make bench-codecs time and bytes of the codecs, compared with hivemind's"
	@echo "make bench-quality cost in loss of codecs between stages, over several seeds"
	@echo "make bench-lateness cost in loss of staleness 1"
	@echo "make bench-bottlenecks cost in loss of bottlenecks at stage boundaries"
	@echo "make bench-agreement distance of a real run with a codec from one process"
	@echo "make bench-gpu tokens/s and FLOPs utilisation of one stage on a GPU, where there is one"
	@echo "make clean    remove what the above have made, except runs"

setup:
	@sh tools/setup.sh user

setup-dev:
	@sh tools/setup.sh dev

demo: setup
	@$(PY) -m swarm_coordinator demo $(ARGS)

test: setup-dev
	@$(PY) -m pytest $(TWO) $(ARGS)

test-runs: setup-dev
	@$(PY) -m pytest -m runs $(TWO) $(ARGS)

test-attacks: setup-dev
	@$(PY) -m pytest -m attacks $(TWO) $(ARGS)

# The seed of a failing run is printed: KILL_SEED=N make test-durability repeats it.
test-durability: setup-dev
	@$(PY) -m pytest -m durability $(ARGS)

test-faults: setup-dev
	@$(PY) -m pytest -m faults $(ARGS)

test-nat: setup-dev
	@$(PY) -m pytest -m nat $(ARGS)

# As root also the .deb and both services, in a throwaway system of their own.
test-installers: setup-dev
	@$(PY) -m pytest -m installers $(ARGS)

fuzz: setup-dev
	@PYTHONPATH=tests $(PY) -m fuzz.run $(ARGS)

check: setup-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: setup-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The preferences page holds a measured table; benchmarks.pages puts it back.
docs: setup-dev
	$(PY) tools/command_reference.py
	$(PY) -m swarm_client.preferences.reference_page > docs/preferences.md
	$(PY) -m benchmarks.pages --write

bench: setup-dev
	@$(PY) -m benchmarks.throughput $(ARGS)

bench-faults: setup-dev
	@$(PY) -m benchmarks.faults $(ARGS)

# The lab of namespaces lies with the tests.
bench-net: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.net $(ARGS)

bench-wan: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.wan $(ARGS)

bench-wan-timeline: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.wan.timeline $(ARGS)

bench-all-reduce: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.wan.all_reduce $(ARGS)

bench-simulator: setup-dev
	@$(PY) -m benchmarks.simulator $(ARGS)

bench-rebalancing: setup-dev
	@$(PY) -m benchmarks.rebalancing $(ARGS)

bench-coordinator: setup-dev
	@$(PY) -m benchmarks.coordinator $(ARGS)

bench-prediction: setup-dev
	@$(PY) -m benchmarks.prediction $(ARGS)

bench-views: setup-dev
	@$(PY) -m benchmarks.views $(ARGS)

bench-yielding: setup-dev
	@$(PY) -m benchmarks.yielding $(ARGS)

bench-counts: setup-dev
	@$(PY) -m benchmarks.counts $(ARGS)

bench-bytes: setup-dev
	@$(PY) -m benchmarks.wire_bytes $(ARGS)

bench-copies: setup-dev
	@$(PY) -m benchmarks.copies $(ARGS)

bench-codecs: setup-dev
	@$(PY) -m benchmarks.codecs $(ARGS)

bench-agreement: setup-dev
	@$(PY) -m benchmarks.agreement $(ARGS)

bench-quality: setup-dev
	@$(PY) -m benchmarks.quality $(ARGS)

bench-lateness: setup-dev
	@$(PY) -m benchmarks.lateness $(ARGS)

bench-bottlenecks: setup-dev
	@$(PY) -m benchmarks.bottlenecks $(ARGS)

bench-gpu: setup-dev
	@$(PY) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find client coordinator shared tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
