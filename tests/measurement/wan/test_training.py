"""The benchmark as a whole, small: real programs train over the network and compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wan.links.network import why_no_network

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

ROOT = Path(__file__).parents[3]
PAIR = """
[links.line]
up_mbit = 50
down_mbit = 50
rtt_ms = 10
[links.server]
up_mbit = 50
down_mbit = 50
[mixes]
four = { machines = [{ link = "line", count = 4 }], SIZES }
eight = { machines = [{ link = "line", count = 8 }], SIZES }
deep = { machines = [{ link = "line", count = 8 }], stages = 2, SIZES }
""".replace("SIZES", "microbatches_per_step = 8, microbatch_seconds = 0.001")


@pytest.mark.parametrize(
    ("mix", "contenders"),
    [
        ("four", ("swarm", "interleaved", "expert", "data-parallel")),
        ("eight", ("1f1b", "expert")),
        ("deep", ("torch", "1f1b", "interleaved")),
    ],
)
@pytest.mark.timeout(400)
def test_contenders_train_over_the_network_to_the_same_losses(
    tmp_path: Path, mix: str, contenders: tuple[str, ...]
) -> None:
    if (reason := why_no_network()) is not None:
        pytest.skip(reason)
    mixes, out = tmp_path / "mixes.toml", tmp_path / "wan.json"
    mixes.write_text(PAIR)
    words = ["--file", str(mixes), "--mix", mix, "--out", str(out), "--no-check"]
    sizes = {
        "steps": 2,
        "warmup": 1,
        "cooldown": 0,
        "repetitions": 1,
    }
    for option, value in sizes.items():
        words += [f"--{option}", str(value)]
    for name in contenders:
        words += ["--only", name]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wan", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())["mixes"][mix]
    found = document["contenders"]
    assert document["loss_disagreement"] == ""
    if mix == "eight":
        assert "omitted" in done.stdout
        assert set(found) == {"1f1b"}
        return
    if mix == "deep":
        assert document["training"]["stages"] == 2
        assert set(found) == set(contenders)
        return
    assert set(found) == set(contenders)
    assert found["swarm"]["bytes_over_minimum"] > 0.9
    assert found["expert"]["bytes_over_minimum"] > 2 * found["swarm"]["bytes_over_minimum"]
    borders = found["swarm"]["runs"][0]["borders"]
    assert [(row["from"], row["to"]) for row in borders] == [(0, 1), (1, 2), (2, 3)]
    # A heartbeat may be missing, and a busy machine hedges.
    assert all(0.5 < row["over_least"] < 1.5 for row in borders), borders
