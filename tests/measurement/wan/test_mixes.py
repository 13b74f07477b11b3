"""The file of lines and fleets: what it may say, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wan.fleet import Sizes
from benchmarks.wan.mixes import Training, read_mixes
from benchmarks.wan.proportions import proportions_of, reference_proportions, settings_sizes
from benchmarks.wan.templates import CHANGES, PRESET
from swarm_coordinator.configuration.run_settings import default_settings
from swarm_shared.base.errors import ConfigurationError

LINK = "[links.slow]\nup_mbit = 1\ndown_mbit = 2\nrtt_ms = 40\njitter_ms = 5\n[mixes]\n"
ONE = "m = { machines = [{ link = 'slow' }] }"


def written(folder: Path, text: str) -> Path:
    path = folder / "mixes.toml"
    path.write_text(text)
    return path


def test_the_projects_own_mixes_are_as_the_benchmark_needs_them() -> None:
    file = read_mixes()
    assert {"fibre", "cable", "dsl", "mobile", "heterogeneous"} <= set(file.mixes)
    assert file.links["cable"].up_mbit < file.links["cable"].down_mbit
    assert "server" in file.links
    for name in file.mixes:
        mix = file.mix(name)
        assert len(mix.peers) % mix.training.stages == 0, "as many peers in each stage"
    assert file.mix("heterogeneous-32").peers == file.mix("heterogeneous").peers


def test_a_mix_is_its_machines_one_by_one(tmp_path: Path) -> None:
    machines = '[{ link = "slow", count = 2, speed = 0.5 }, { link = "slow" }]'
    mix = read_mixes(written(tmp_path, f"{LINK}two = {{ machines = {machines} }}\n")).mix("two")
    assert [peer.speed for peer in mix.peers] == [0.5, 0.5, 1.0]
    assert mix.peers[0].link.up_bytes_per_second == 125_000
    assert mix.training == Training()


def test_a_mix_may_train_something_else(tmp_path: Path) -> None:
    text = LINK.replace("[mixes]\n", "[mixes.small]\nstages = 2\nmicrobatches_per_step = 8\n")
    text += 'machines = [{ link = "slow", count = 2 }]\nsettings = { "model.layers" = 3 }\n'
    training = read_mixes(written(tmp_path, text)).mix("small").training
    assert training == Training(
        stages=2, microbatches_per_step=8, settings={"model.layers": 3}
    )  # fmt: skip
    assert training.microbatch_seconds == Training().microbatch_seconds


def test_a_mix_in_slow_motion_keeps_its_proportions() -> None:
    file = read_mixes()
    mix, slow = file.mix("heterogeneous-32"), file.mix("heterogeneous-32-slow")
    assert slow.training.microbatch_seconds == 3 * mix.training.microbatch_seconds
    for one, other in zip(mix.peers, slow.peers, strict=True):
        assert (one.link_name, one.speed) == (other.link_name, other.speed)
        assert other.link.rtt_ms == 3 * one.link.rtt_ms
        assert other.link.jitter_ms == 3 * one.link.jitter_ms
        assert other.link.loss_percent == one.link.loss_percent
        assert 3 * other.link.up_mbit == pytest.approx(one.link.up_mbit)
        assert 3 * other.link.down_mbit == pytest.approx(one.link.down_mbit)
        assert other.link.slower(1) == other.link


def test_the_mix_like_1b_averages_as_large_a_share_of_its_bytes() -> None:
    """Without run folders: the planner says what its stages have."""
    training = read_mixes().mix("cable-1b").training
    sizes = planned_sizes(training)
    layers = 2 * (32 + 16) + 3 * 56 + 2
    assert [size // (4 * 3072) for size in sizes.gradient_bytes] == [256 + layers, 257 + layers]
    own = proportions_of(sizes, training.microbatch_seconds, 1.0).gradients_over_tensors
    assert own == pytest.approx(reference_proportions().gradients_over_tensors, rel=0.03)


def planned_sizes(training: Training) -> Sizes:
    changes = {
        **CHANGES, **training.settings, "stages.count": training.stages,
        "training.microbatches_per_step": training.microbatches_per_step,
    }  # fmt: skip
    return settings_sizes(default_settings(PRESET, changes))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[links", "is not valid TOML"),
        (LINK + "m = { machines = [{ link = 'fast' }] }", "names link 'fast'; there are slow"),
        (LINK + "m = { machines = [{ link = 'slow', count = 0 }] }", "mixes.m.machines.0.count"),
        (LINK + "m = { machines = [] }", "mixes.m.machines"),
        (LINK + "m = { machines = [{ link = 'slow', sped = 1 }] }", "mixes.m.machines.0.sped"),
        (LINK + "m = { machines = [{ link = 'slow' }], stages = 1 }", "mixes.m.stages"),
        (LINK + "m = { machines = [{ link = 'slow' }], stage = 2 }", "mixes.m.stage"),
        (LINK.replace("jitter_ms = 5", "jitter_ms = 21") + ONE, "jitter_ms"),
        (LINK.replace("up_mbit = 1", "up_mbit = 0") + ONE, "up_mbit"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mixes\.toml") as refusal:
        read_mixes(written(tmp_path, text))
    assert complaint in str(refusal.value)


def test_a_mix_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    file = read_mixes(written(tmp_path, LINK + ONE))
    with pytest.raises(ConfigurationError, match=r"no mix 'x'; choose one of m"):
        file.mix("x")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_mixes(tmp_path / "none.toml")
