"""`init --fleet`: the number of stages and the cut for the machines that are expected."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.coordinator.commands import complaint, edit
from swarm_coordinator.cli.main import run
from swarm_coordinator.configuration.run_settings import default_settings
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_creation.fleet_cut import (
    STAGE_COUNTS,
    ExpectedFleet,
    fleet_row,
    fleet_rows,
    recommended,
)
from swarm_coordinator.run_creation.initialise import initialise_run, refresh_manifest
from swarm_coordinator.run_creation.stage_plan import StagePlan, in_stages, plan_of
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.simulator.fleet import FleetFile, Hardware, HardwareClass, make_fleet
from swarm_shared.base.errors import CapacityError
from swarm_shared.run.manifest import Manifest, StageRange

SIZES: dict[str, object] = {
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.heads": 2,
    "model.key_value_heads": 2,
    "model.layers": 6,
    "model.vocabulary_size": 2048,
    "model.sequence_length": 16,
    "training.sequences_per_microbatch": 2,
}
SETTINGS = default_settings("tiny", SIZES)
SMALLEST_GIB = max(
    stage.memory.device_bytes + stage.memory.host_bytes
    for stage in plan_of(in_stages(SETTINGS, 8)).stages
) / 2**30  # fmt: skip
"""Memory that holds every stage of the finest cut, whose ends hold a table of tokens each."""


def machine(gib: float, **figures: float) -> HardwareClass:
    values = {"teraflops": 1.0, "up_mbit": 100.0, "down_mbit": 400.0, "latency_ms": 1.0} | figures
    return HardwareClass.model_validate({"name": "one", "memory_gib": gib, **values})


def fleet_of(*classes: HardwareClass) -> list[Hardware]:
    count = sum(one.machines for one in classes)
    return make_fleet(FleetFile(classes=classes), count, random.Random(1))


IN_TWO = in_stages(
    default_settings(
        "tiny",
        SIZES
        | {
            "model.vocabulary_size": 256,
            "model.sequence_length": 4,
            "training.sequences_per_microbatch": 1,
        },
    ),
    2,
)
"""In two stages; either table of tokens has the parameters of two layers."""

hardware_classes = st.builds(
    machine,
    st.sampled_from([0.1, 0.6, 1.01, 1.2, 2, 4]).map(lambda times: times * SMALLEST_GIB),
    machines=st.integers(1, 5),
    teraflops=st.sampled_from([1e-6, 1e-3, 1.0]),
    spread=st.sampled_from([0.0, 0.5]),
    up_mbit=st.sampled_from([0.1, 10.0, 1e5]),
    host_memory_gib=st.none() | st.sampled_from([SMALLEST_GIB / 4, SMALLEST_GIB]),
)


@settings(max_examples=40)
@given(st.lists(hardware_classes, min_size=1, max_size=4))
def test_the_table_counts_the_machines_and_the_highest_rate_is_recommended(
    classes: list[HardwareClass],
) -> None:
    machines = fleet_of(*classes)
    fleet = ExpectedFleet(machines)
    rows = fleet_rows(SETTINGS, fleet, choose_sizes=False)
    assert [row.stage_count for row in rows] == list(range(2, 9))
    for row in rows:
        stages = row.plan.stages
        holders = [any(m.memory.holds(stage.memory) for stage in stages) for m in machines]
        assert row.holders == sum(holders)
        plain = fleet_row(row.settings, fleet, plan_of(row.settings))
        assert row.tokens_per_second >= plain.tokens_per_second
        if row.tokens_per_second > 0:
            assert row.stage_count <= row.holders
            assert all(any(m.memory.holds(stage.memory) for m in machines) for stage in stages)
    rates = [row.tokens_per_second for row in rows]
    if max(rates) > 0:
        assert recommended(rows, fleet) is rows[rates.index(max(rates))]
    else:
        with pytest.raises(CapacityError, match="can hold no cut into 2 to 8 stages"):
            recommended(rows, fleet)


def ends(plan: StagePlan) -> list[int]:
    return [stage.end_layer for stage in plan.stages]


def memory_gib(stage: StageRange) -> float:
    return (stage.memory.device_bytes + stage.memory.host_bytes) / 2**30


def test_over_thin_lines_averaging_takes_the_time_and_parameters_are_shared_equally() -> None:
    """The embedding is a table of parameters without FLOPs."""
    fleet = ExpectedFleet(fleet_of(machine(8, machines=12, up_mbit=0.1)))
    row = fleet_rows(IN_TWO, fleet, choose_sizes=False)[0]
    assert ends(plan_of(IN_TWO)) == [4, 6]
    assert ends(row.plan) == [3, 6]
    slow = {"machines": 12, "teraflops": 1e-6, "up_mbit": 1e5}
    row = fleet_rows(IN_TWO, ExpectedFleet(fleet_of(machine(8, **slow))), choose_sizes=False)[0]
    assert ends(row.plan) == [4, 6]


@pytest.mark.parametrize(("share", "cut"), [(0.8, [4, 6]), (0.9, [3, 6])])
def test_the_cut_fits_the_smallest_machines_where_any_cut_does(
    share: float, cut: list[int]
) -> None:
    """Of the memory of the largest stage, most machines offer this share."""
    slow = {"teraflops": 1e-6, "up_mbit": 1e5}
    small = share * memory_gib(plan_of(IN_TWO).stages[0])
    classes = machine(small, machines=20, **slow), machine(8, machines=1, **slow)
    row = fleet_rows(IN_TWO, ExpectedFleet(fleet_of(*classes)), choose_sizes=False)[0]
    assert ends(row.plan) == cut
    assert [memory_gib(stage) <= small for stage in row.plan.stages] == [cut[0] == 3, True]


def test_a_large_fleet_is_judged_by_a_part_of_it() -> None:
    one = ExpectedFleet(fleet_of(machine(8, machines=1000)))
    ten = ExpectedFleet(fleet_of(machine(8, machines=10_000)))
    few, many = (fleet_rows(in_stages(SETTINGS, 2), each, False)[0] for each in (one, ten))
    assert many.holders == 10 * few.holders == 10_000
    assert few.tokens_per_second < many.tokens_per_second


# ---------------------------------------------------------------- the command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of some text\n" for number in range(400)))
    return path


def fleet_file(path: Path, *classes: HardwareClass) -> str:
    path.write_text(FleetFile(classes=classes).model_dump_json(exclude_none=True))
    return str(path)


def words(text: Path, *more: str) -> list[str]:
    given = [f"{name}={json.dumps(value)}" for name, value in SIZES.items()]
    sets = [word for one in given for word in ("--set", one)]
    return ["init", str(text.parent / "run"), "--data", str(text), *sets, *more]


def cut_of(manifest: Manifest) -> list[int]:
    return [stage.end_layer for stage in manifest.stages]


@pytest.mark.process
def test_init_takes_the_recommended_number_of_stages_and_prints_the_table(text: Path) -> None:
    fleet = fleet_file(text.parent / "fleet.json", machine(8, machines=9, up_mbit=0.1))
    done = subprocess.run(
        [sys.executable, "-m", "swarm_coordinator", *words(text, "--fleet", fleet)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith("cuts for 9 machine(s)")
    table = [line for line in lines if line[2:9].strip().isdecimal()]
    assert [int(line[2:9]) for line in table] == [n for n in STAGE_COUNTS if n <= 8]
    assert all("100%" in line for line in table)
    rates = {int(line[2:9]): line.split()[-1].replace(",", "") for line in table}
    marked = [int(line[2:9]) for line in table if line.startswith("*")]
    manifest = load_manifest(RunFolder.open(text.parent / "run"))
    assert marked == [manifest.stage_count]
    assert int(rates[marked[0]]) == max(int(rate) for rate in rates.values() if rate != "none")
    assert f"stages: {marked[0]}, the highest rate; --stages N chooses another number" in lines


def test_a_given_number_of_stages_is_kept_and_a_refresh_keeps_the_cut(text: Path) -> None:
    folder = RunFolder(text.parent / "run")
    fleet = fleet_file(text.parent / "fleet.json", machine(8, machines=12, up_mbit=0.1))
    lines: list[str] = []
    made = initialise_run(folder.path, "tiny", str(text), 3, SIZES, lines.append, fleet)
    assert "stages: 3, as given" in lines
    assert cut_of(made) == [1, 5, 6]
    edit(folder, ("\nsteps = 60\n", "\nsteps = 7\n"))
    again = refresh_manifest(folder)
    assert again.training.steps == 7
    assert again.stages == made.stages
    edit(folder, ("count = 3", "count = 2"))
    assert refresh_manifest(folder).stage_count == 2


def test_a_preset_in_more_stages_than_the_model_has_parts_is_cut_into_fewer(text: Path) -> None:
    sizes = SIZES | {"model.layers": 3, "data.tokenizer": "bytes"}
    made = initialise_run(text.parent / "run", "1b", str(text), overrides=sizes, fleet="home")
    assert 2 <= made.stage_count <= 5


@pytest.mark.parametrize(
    ("fleet", "code", "sentence"),
    [
        ("nothing.json", 5, "nothing.json cannot be read"),
        ("{text}", 5, "is not a fleet"),
        ("0", 2, "a fleet has 1 to 1,000,000 machines, not 0"),
        ("1", 6, "the 1 machine(s) of this fleet can hold no cut into 2 to 8 stages"),
        ("{small}", 6, "with 8, the largest stage needs "),
    ],
)
def test_a_fleet_that_is_none_or_can_hold_nothing_is_refused_with_one_sentence(
    text: Path, capsys: pytest.CaptureFixture[str], fleet: str, code: int, sentence: str
) -> None:
    small = fleet_file(text.parent / "small.json", machine(SMALLEST_GIB / 100, machines=50))
    before = set(text.parent.iterdir())
    fleet = fleet.replace("{text}", str(text)).replace("{small}", small)
    assert run(words(text, "--fleet", fleet)) == code
    assert sentence in complaint(capsys)
    assert set(text.parent.iterdir()) == before
