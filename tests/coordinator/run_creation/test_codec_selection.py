"""What `auto` in [codecs] of run.toml becomes, and how the organiser is told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from click.testing import CliRunner

from kits.coordinator.commands import edit
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import cli
from swarm_coordinator.configuration.command_line import parse_codec
from swarm_coordinator.configuration.run_settings import (
    RunSettings,
    default_settings,
    parse_run_toml,
)
from swarm_coordinator.configuration.template import render_run_toml
from swarm_coordinator.durability.run_files import changed_settings, load_manifest, load_settings
from swarm_coordinator.run_creation.codec_selection import (
    SAMPLE_ELEMENTS,
    measure_costs,
    select_codecs,
)
from swarm_coordinator.run_creation.initialise import refresh_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.codecs.quality import QualityTable, quality_table
from swarm_shared.run.codec_sizes import GRADIENT_CODECS, encoded_bytes
from swarm_shared.run.manifest import CodecsConfig

AUTO = {"codecs.activation": "auto", "codecs.gradient": "auto"}


def settings(**changes: object) -> RunSettings:
    overrides = {f"codecs.{name}": value for name, value in changes.items()}
    return default_settings("tiny", {"stages.count": 2} | AUTO | overrides)


def table(**gaps: float) -> QualityTable:
    """The pairs of one codec both ways, with these gaps; float32 costs nothing."""
    pairs = [
        {"activation": name, "gradient": name, "gap_relative": gap}
        for name, gap in {"none": 0.0, **gaps}.items()
    ]
    return QualityTable.model_validate(
        {
            "source": "a test",
            "measured_at": "",
            "steps": 1,
            "seeds": 2,
            "noise_relative": 0.01,
            "pairs": {f"{one['activation']} / {one['gradient']}": one for one in pairs},
        }
    )


def test_on_a_slow_line_fewer_bytes_win_among_what_the_budget_allows():
    gaps = {"float16": 0.0001, "int8": 0.004, "int4": 0.02}
    for budget, chosen in ((0.0, "none"), (0.001, "float16"), (0.01, "int8"), (0.05, "int4")):
        # So slow that no time of encoding shows.
        asked = settings(largest_loss_gap=budget, up_mbit_per_second=0.01)
        found, why = select_codecs(asked, table(**gaps))
        pair = CodecsConfig(activation=chosen, gradient=chosen, average="exact")
        assert found.codecs.config == pair
        assert f"{chosen} for activations, {chosen} for gradients" in why
        assert "0.01 Mbit/s" in why


def test_a_codec_takes_what_the_clock_says():
    ticks = itertools.count()
    costs = measure_costs(["none", "int8"], 1000, "float32", lambda: float(next(ticks)))
    assert {name: cost.seconds for name, cost in costs.items()} == {"none": 1.0, "int8": 1.0}
    assert costs["int8"].nbytes == encoded_bytes("int8", 1000, "float32")


def test_of_a_long_activation_a_part_is_measured_and_the_whole_is_reckoned():
    ticks = itertools.count()
    elements = 4 * SAMPLE_ELEMENTS
    costs = measure_costs(GRADIENT_CODECS, elements, "bfloat16", lambda: float(next(ticks)))
    for name, cost in costs.items():
        assert cost.seconds == 4.0
        assert cost.nbytes == encoded_bytes(name, elements, "bfloat16")


def test_a_single_stage_has_no_border_and_nothing_is_measured():
    alone = default_settings("tiny", {"stages.count": 1} | AUTO)
    found, why = select_codecs(alone, clock=lambda: pytest.fail("it is measured"))
    assert found.codecs.config == CodecsConfig(average="exact")
    assert "one stage has no boundary" in why


def test_a_budget_that_no_pair_keeps_is_refused_with_one_that_is_kept():
    lossy = table(int8=0.01)
    without_none = lossy.model_copy(update={"pairs": {"int8 / int8": lossy.pairs["int8 / int8"]}})
    with pytest.raises(ConfigurationError, match=r"largest_loss_gap must be at least 0\.01"):
        select_codecs(settings(largest_loss_gap=0.001), without_none)


def test_what_is_not_left_to_choose_stays_as_it_is_written():
    found, _ = select_codecs(settings(average="int8"), table())
    assert found.codecs.config.average == "int8"
    assert found.codecs.largest_loss_gap == settings().codecs.largest_loss_gap


def test_auto_stands_for_both_directions_or_for_none():
    with pytest.raises(ConfigurationError, match='write "auto" for both'):
        parse_run_toml('[codecs]\nactivation = "auto"\n')


@pytest.mark.parametrize(
    ("text", "activation", "gradient"),
    [("auto", "auto", "auto"), ("int8", "int8", "int8"), ("int8 / topk", "int8", "topk")],
)
def test_a_codec_of_the_command_line_is_one_name_or_two(text: str, activation: str, gradient: str):
    assert parse_codec(text) == {"codecs.activation": activation, "codecs.gradient": gradient}


# ---------------------------------------------------------------- in a run folder


def test_init_writes_down_what_it_chose_and_says_why(tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("abcdefgh " * 9000)
    words = [
        "init", str(tmp_path / "run"), "--codec", "auto", "--data", str(text), "--stages", "2",
        "--set", "codecs.up_mbit_per_second=0.01", "--set", "model.hidden_size=16",
        "--set", "model.intermediate_size=16", "--set", "model.heads=2",
        "--set", "model.key_value_heads=2", "--set", "model.sequence_length=16",
    ]  # fmt: skip
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    folder = RunFolder(tmp_path / "run")
    codecs = load_manifest(folder).codecs
    cheapest = min(
        (one for one in quality_table().pairs.values()
         if one.gap_relative <= load_settings(folder).codecs.largest_loss_gap),
        key=lambda one: encoded_bytes(one.activation, 4096, "float32")
        + encoded_bytes(one.gradient, 4096, "float32"),
    )  # fmt: skip
    assert (codecs.activation, codecs.gradient) == (cheapest.activation, cheapest.gradient)
    assert load_settings(folder).codecs.config == codecs
    sentences = [line for line in done.output.splitlines() if line.startswith("codecs: ")]
    assert len(sentences) == 1
    assert f"{codecs.activation} for activations" in sentences[0]


def test_auto_that_is_written_later_is_followed_once_and_keeps_every_other_word(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    edit(
        folder,
        ('activation = "int8"', 'activation = "auto"  # whatever is best'),
        ('gradient = "int8"', 'gradient = "auto"'),
        ("up_mbit_per_second = 20", "up_mbit_per_second = 0.01"),
    )
    asked = folder.settings.read_text()
    said: list[str] = []
    manifest = refresh_manifest(folder, said.append)
    codecs = manifest.codecs
    assert codecs.activation != "none"
    assert folder.settings.read_text() == asked.replace(
        'activation = "auto"', f'activation = "{codecs.activation}"'
    ).replace('gradient = "auto"', f'gradient = "{codecs.gradient}"')
    assert changed_settings(folder, load_settings(folder), manifest) == []
    assert len(said) == 1
    assert refresh_manifest(folder, said.append).codecs == codecs
    assert len(said) == 1


def test_the_budget_alone_changes_no_run():
    changed = default_settings("tiny", {"codecs.largest_loss_gap": 0.5})
    assert changed.codecs.config == default_settings("tiny").codecs.config
    assert "largest_loss_gap = 0.5\n" in render_run_toml(changed)
