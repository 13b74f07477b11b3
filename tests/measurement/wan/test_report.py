"""From steps and counters to figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.run_data import TimedStep, loss_disagreement
from benchmarks.wan.contenders.running import Outcome
from benchmarks.wan.links.check import LinkCheck, one_of_each
from benchmarks.wan.links.network import Sample
from benchmarks.wan.links.traffic import bytes_between
from benchmarks.wan.mixes import Link
from benchmarks.wan.page import wan_markdown
from benchmarks.wan.report import result_row

CABLE = Link(up_mbit=20, down_mbit=200, rtt_ms=40, jitter_ms=2)


def sample(at: float, sent: int) -> Sample:
    return Sample(at, {"a": sent}, {"a": 2 * sent}, at / 2)


def test_bytes_between_two_moments_are_interpolated() -> None:
    samples = [sample(1.0, 0), sample(2.0, 100), sample(4.0, 500)]
    assert bytes_between(samples, 1.5, 3.0) == ({"a": 250.0}, {"a": 500.0})
    assert bytes_between(samples, 0.0, 9.0) == ({"a": 500.0}, {"a": 1000.0})


@pytest.mark.parametrize("cooldown", [0, 1])
def test_steps_are_timed_from_the_end_of_the_warm_up_to_the_begin_of_the_cool_down(
    cooldown: int,
) -> None:
    ends = (1.0, 2.0, 4.0, 9.0)[: 3 + cooldown]
    timed = [TimedStep(n, 1.0, 70, 0.1, at) for n, at in enumerate(ends, 1)]
    samples = [sample(1.0, 0), sample(2.0, 100), sample(4.0, 500), sample(9.0, 9000)]
    row = result_row(Outcome(timed), 1, cooldown, samples)
    assert row["tokens_per_second"] == pytest.approx(140 / 3)
    assert row["step_seconds"] == pytest.approx(1.5)
    assert row["sent_bytes_per_step"] == {"a": 250}
    assert row["received_bytes_per_step"] == {"a": 500}
    assert row["busy_cores"] == pytest.approx(0.5)


def test_another_loss_is_found_and_named() -> None:
    alike = {"torch": [[2.0, 1.0]], "swarm": [[2.00001, 1.0]]}
    assert loss_disagreement(alike) == ""
    apart = {**alike, "1f1b": [[2.0, 1.001]]}
    assert loss_disagreement(apart).startswith("step 2: 1f1b has 1.001")


@pytest.mark.parametrize(
    ("up", "rtt", "complaints"),
    [(19.0, 41.0, 0), (17.9, 41.0, 1), (22.1, 41.0, 1), (20.0, 43.0, 1), (20.0, 37.0, 1)],
)
def test_a_line_that_is_not_as_asked_is_complained_about(
    up: float, rtt: float, complaints: int
) -> None:
    found = LinkCheck("m", CABLE, up, 200.0, rtt, 1.0).complaints()
    assert len(found) == complaints, found


def test_one_machine_of_each_kind_of_line_is_measured() -> None:
    other = Link(up_mbit=1, down_mbit=1)
    assert one_of_each({"a": CABLE, "b": CABLE, "c": other}) == ["a", "c"]


def test_the_page_says_what_a_mix_trains_where_it_is_not_the_usual() -> None:
    def training(stages: int) -> dict[str, Any]:
        return {
            "stages": stages, "model": {"hidden_size": 64, "layers": 8},
            "microbatches_per_step": 16, "microbatch_seconds": 0.25,
        }  # fmt: skip

    own = {
        **training(2),
        "proportions": {"gradients_over_tensors": 0.0929, "computing_over_sending": 0.231},
        "reference": {
            "preset": "1b", "gradients_over_tensors": 0.092, "computing_over_sending": 0.0096,
        },
    }  # fmt: skip
    row = {
        "tokens_per_second_median": 1.0, "tokens_per_second_all": [1.0], "of_bound": 0.5,
        "compute_share": 0.5, "bytes_over_minimum": 1.0, "busy_cores_median": 0.5,
    }  # fmt: skip
    mix = {
        "name": "usual", "measured_at": "2026-11-27T02:00", "load_before": 0.1, "machines": [],
        "checks": [], "contenders": {"swarm": row}, "bound_tokens_per_second": 2.0,
    }  # fmt: skip
    document = {
        "machine": {"cpu_count": 2, "processor": "P"}, "steps": 6, "warmup_steps": 2,
        "cooldown_steps": 1, "contenders": {"swarm": "swarm"}, **training(4),
        "mixes": {"usual": mix, "own": {**mix, "name": "own", "training": own}},
    }  # fmt: skip
    usual, its_own = wan_markdown(document).split("**own**")
    assert "Unless a mix says otherwise: 4 stages, width 64" in usual
    assert "It trains" not in usual
    assert "It trains 2 stages, width 64" in its_own
    assert "0.093 (preset `1b`: 0.092)" in its_own
