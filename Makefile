# Everything a person runs here. Only relative paths, because make splits names at spaces and the
# folder this lies in may have some.
#
#   make demo ARGS="--volunteers 6 --stages 3"     make test ARGS="tests/shared -k invite"

PY := .venv/bin/python
# Extra arguments for demo, test and bench.
ARGS ?=
# Workers take whole files, or (loadgroup) single tests and whole groups of tests that share a fixture;
# the longest first. Two are meant for two cores, where programs compute; unit tests wait a fifth of
# their time, which a third worker fills.
WORKERS = --no-loadscope-reorder -n
RECORD = --durations=30 --durations-min=2 --junitxml=build/junit/$@.xml
PYTEST = $(PY) -m pytest $(RECORD)
# The promise as tests: a real run under churn, the core under random faults, the sums, the reference.
PROOF = tests/integration/test_exact.py tests/client/pipeline/test_exact_run.py \
        tests/coordinator/core/test_world.py tests/coordinator/offline/test_reference.py \
        tests/client/averaging/all_reduce/test_exact_codec.py \
        tests/client/averaging/all_reduce/test_reduce.py tests/shared/model/test_fixed_point_sums.py

.PHONY: help setup setup-dev demo prove test test-process test-lab test-nightly test-strangers fuzz \
        check format docs lock bench bench-processor-seconds bench-faults bench-net bench-wan bench-wan-timeline bench-all-reduce \
        bench-simulator bench-rebalancing bench-routing \
        bench-coordinator bench-prediction bench-views bench-yielding bench-codecs bench-quality \
        bench-lateness bench-bottlenecks bench-local-steps bench-agreement bench-trust bench-trust-detection \
        bench-trust-honest bench-strangers \
        bench-counts bench-bytes bench-copies bench-gpu bench-memory clean

help:
	@echo "make setup    virtual environment and packages into .venv"
	@echo "make demo     train a small model across processes of this machine, kill one of them, and compare the"
	@echo "              losses with those of one process (ARGS=\"--volunteers 4 --stages 2\")"
	@echo "make prove    the tests of the promise: a run under churn computes what one process computes, to the bit"
	@echo "make test     unit tests and one whole run (ARGS are pytest's)"
	@echo "make test-process real programs: runs under churn, injected faults, attacks, killed coordinators"
	@echo "make test-lab real network stacks behind NAT; needs root, and sh tools/install_network_lab.sh"
	@echo "make test-nightly what not each run needs: more runs and faults, all labs, the .deb under a real systemd"
	@echo "make test-strangers every known attack, with modified clients in real runs (an hour)"
	@echo "make fuzz     decoders under atheris for longer (ARGS=\"--seconds 600 muxer\")"
	@echo "make check    formatting, lint, strict types, import contracts, declared dependencies"
	@echo "make format   apply the formatting"
	@echo "make docs     write the pages made from the code: docs/commands.md, docs/preferences.md"
	@echo "make lock     write the versions of all installed packages to constraints.txt"
	@echo "make bench    measure throughput, side by side with torch alone (ARGS=\"--repetitions 1\")"
	@echo "make bench-processor-seconds where the processors' seconds of a step go, beside torch's own pipeline; needs perf and root"
	@echo "make bench-faults measure what killed, frozen and leaving peers cost"
	@echo "make bench-net measure links behind NAT; needs what test-lab needs"
	@echo "make bench-wan train over emulated home links, compared with torch and hivemind; needs what test-lab needs"
	@echo "make bench-wan-timeline how each machine spends the seconds of a step over such links"
	@echo "make bench-all-reduce the all-reduce of a stage over such links, compared with its bound"
	@echo "make bench-simulator measure how the simulator and placement grow with the fleet"
	@echo "make bench-rebalancing compare rules of moving peers (ARGS=\"FOLDER_OF_RECORDINGS\")"
	@echo "make bench-routing compare rules of choosing peers in fleets of 4 to 1,000 machines"
	@echo "make bench-coordinator thousands of simulated volunteers at the real coordinator"
	@echo "make bench-prediction the simulator's prediction compared with real, throttled processes"
	@echo "make bench-views start time and load of the terminal views"
	@echo "make bench-yielding seconds until a machine is free after a key press of its user"
	@echo "make bench-trust tokens/s with verified work over tokens/s without; as root also over cable lines"
	@echo "make bench-strangers a run a third of whose members lie, compared with its honest members alone"
	@echo "make bench-trust-detection how soon simulated liars are found, compared with the formula"
	@echo "make bench-trust-honest verdicts among honest machines with other kernels and threads"
	@echo "make bench-counts bytes of messages and instructions of small work, against the baseline"
	@echo "make bench-bytes bytes on the wire of a real run, over the tensors in it"
	@echo "make bench-copies copies of a tensor's bytes per hop; needs a C compiler"
	@echo "make bench-codecs time and bytes of the codecs, compared with hivemind's"
	@echo "make bench-quality cost in loss of codecs between stages, over several seeds"
	@echo "make bench-lateness cost in loss of staleness 1"
	@echo "make bench-bottlenecks cost in loss of bottlenecks at stage boundaries"
	@echo "make bench-local-steps cost in loss of several steps between two averages (ARGS=\"--minutes 30\")"
	@echo "make bench-agreement distance of a real run with a codec from one process"
	@echo "make bench-memory speed and peak memory of a stage under budgets of device memory"
	@echo "make bench-gpu tokens/s and FLOPs utilisation of one stage on a GPU, where there is one"
	@echo "make clean    remove what the above have made, except runs"

setup:
	@sh tools/setup.sh user

setup-dev:
	@sh tools/setup.sh dev

demo: setup
	@$(PY) -m swarm_coordinator demo $(ARGS)

prove: setup-dev
	@$(PY) -m pytest -q --no-header --tier unit $(WORKERS) 2 --dist loadfile $(PROOF)
	@echo "Proved: in a real run of five volunteers, of which two were killed and one joined late, and whose"
	@echo "coordinator was killed and started again, every loss and every parameter is that of one process, to"
	@echo "the bit. In simulated runs with random faults every microbatch counted exactly once in every stage,"
	@echo "and every run ended. The one process agrees with a plain torch loop within rounding."

test: setup-dev
	@$(PYTEST) $(WORKERS) 3 --dist loadfile $(ARGS)

# Random tests print their seed; KILL_SEED=N, WORLD_SEED=N or SWARM_CHAOS_SEED=N repeats it.
test-process: setup-dev
	@$(PYTEST) --tier process $(WORKERS) 2 --dist loadgroup $(ARGS)

# Every known attack (tests/kits/attack/attacks.toml), modified clients in real runs first.
test-strangers: setup-dev
	@$(PYTEST) --tier all $(WORKERS) 2 --dist loadgroup $$(PYTHONPATH=tests $(PY) -m kits.attack.catalogue) $(ARGS)

# One worker: two labs cannot run at once.
test-lab: setup-dev
	@$(PYTEST) --tier lab $(ARGS)

# Needs what test-lab needs, and sh tools/install_installer_tools.sh.
test-nightly: setup-dev
	@$(PYTEST) --tier nightly $(WORKERS) 2 --dist loadgroup $(ARGS)

bench-strangers: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.trust.strangers $(ARGS)

fuzz: setup-dev
	@PYTHONPATH=tests $(PY) -m fuzz.run $(ARGS)

check: setup-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/mypy.ini
	.venv/bin/lint-imports
	.venv/bin/deptry client coordinator shared

format: setup-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The preferences page holds a measured table; benchmarks.pages puts it back.
docs: setup-dev
	$(PY) tools/command_reference.py
	$(PY) -m swarm_client.preferences.reference_page > docs/preferences.md.new
	mv docs/preferences.md.new docs/preferences.md
	$(PY) -m benchmarks.pages --write

lock: setup-dev
	$(PY) tools/lock.py

bench: setup-dev
	@$(PY) -m benchmarks.throughput $(ARGS)

bench-processor-seconds: setup-dev
	@$(PY) -m benchmarks.throughput.processor_seconds $(ARGS)

bench-faults: setup-dev
	@$(PY) -m benchmarks.throughput.faults $(ARGS)

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
	@$(PY) -m benchmarks.simulator.rebalancing $(ARGS)

bench-routing: setup-dev
	@$(PY) -m benchmarks.simulator.routing $(ARGS)

bench-coordinator: setup-dev
	@$(PY) -m benchmarks.coordinator $(ARGS)

bench-prediction: setup-dev
	@$(PY) -m benchmarks.simulator.prediction $(ARGS)

bench-views: setup-dev
	@$(PY) -m benchmarks.desktop.views $(ARGS)

bench-yielding: setup-dev
	@$(PY) -m benchmarks.desktop.yielding $(ARGS)

bench-trust: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.trust.overhead $(ARGS)

bench-trust-detection: setup-dev
	@$(PY) -m benchmarks.trust.detection $(ARGS)

bench-trust-honest: setup-dev
	@PYTHONPATH=tests $(PY) -m benchmarks.trust.honest $(ARGS)

bench-counts: setup-dev
	@$(PY) -m benchmarks.counts $(ARGS)

bench-bytes: setup-dev
	@$(PY) -m benchmarks.wire_bytes $(ARGS)

bench-copies: setup-dev
	@$(PY) -m benchmarks.copies $(ARGS)

bench-codecs: setup-dev
	@$(PY) -m benchmarks.codecs $(ARGS)

bench-agreement: setup-dev
	@$(PY) -m benchmarks.loss.agreement $(ARGS)

bench-quality: setup-dev
	@$(PY) -m benchmarks.loss.quality $(ARGS)

bench-lateness: setup-dev
	@$(PY) -m benchmarks.loss.lateness $(ARGS)

bench-bottlenecks: setup-dev
	@$(PY) -m benchmarks.loss.bottlenecks $(ARGS)

bench-local-steps: setup-dev
	@$(PY) -m benchmarks.loss.local_steps $(ARGS)

bench-memory: setup-dev
	@$(PY) -m benchmarks.stage.memory $(ARGS)

bench-gpu: setup-dev
	@$(PY) -m benchmarks.stage.gpu $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find client coordinator shared tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
