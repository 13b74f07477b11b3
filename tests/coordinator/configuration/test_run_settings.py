from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.manifests import manifest_of, stage_ranges
from swarm_coordinator.configuration.command_line import parse_override
from swarm_coordinator.configuration.run_settings import (
    RunSettings,
    default_settings,
    parse_run_toml,
    settings_differences,
)
from swarm_coordinator.configuration.template import render_run_toml
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.codecs.quality import quality_table
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import PRESETS, preset
from swarm_shared.settings.commented_toml import toml_value


@pytest.mark.parametrize("name", PRESETS)
def test_the_written_file_says_what_was_meant(name: str):
    settings = default_settings(name)
    assert parse_run_toml(render_run_toml(settings)) == settings
    assert settings.model.config == PRESETS[name].model


quoted = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(
    st.fixed_dictionaries(
        {
            "run.name": quoted,
            "run.seed": st.integers(0, 2**53 - 1),
            "data.source": quoted,
            "optimizer.learning_rate": st.floats(1e-9, 10.0),
            "optimizer.epsilon": st.floats(1e-12, 1.0),
            "model.rope_theta": st.floats(1.0, 1e9, exclude_min=True),  # yarn needs more than 1
            "model.tie_embeddings": st.booleans(),
            "model.attention_bias": st.sampled_from(["none", "qkv", "all"]),
            "model.attention_head_size": st.sampled_from([0, 8, 128]),
            "model.rope_scaling": st.one_of(
                st.just({}),
                st.fixed_dictionaries(
                    {
                        "kind": st.sampled_from(["none", "linear", "llama3", "yarn"]),
                        "factor": st.floats(1, 1e6),
                        "original_length": st.integers(1, 10**7),
                    }
                ),
            ),
            "training.steps": st.integers(1, 10**12),
            "network.announce": st.lists(quoted, max_size=3),
        }
    )
)
@settings(max_examples=100, deadline=None)
def test_any_settings_survive_being_written_and_read(overrides: dict[str, object]):
    settings = default_settings("tiny", overrides)
    assert parse_run_toml(render_run_toml(settings)) == settings
    assert settings.run.name == overrides["run.name"]


SELF_EXPLANATORY = {
    "model.preset", "model.layers", "model.norm_epsilon",
    "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon",
}  # fmt: skip


def test_every_setting_of_the_written_file_is_described_or_self_explanatory():
    bare = {
        f"{section}.{name}"
        for section in RunSettings.model_fields
        for name, field in type(getattr(default_settings("tiny"), section)).model_fields.items()
        if not field.description
    }
    assert bare == SELF_EXPLANATORY
    assert all(field.description for field in RunSettings.model_fields.values())


def test_an_overridden_size_is_a_setting_and_the_others_are_shown_as_comments():
    text = render_run_toml(default_settings("tiny", {"model.layers": 6}))
    assert "\nlayers = 6\n" in text
    assert "\n# hidden_size = 128\n" in text


def test_an_empty_file_is_a_tiny_run():
    settings = parse_run_toml("")
    assert settings.model.config == preset("tiny").model
    assert settings.training.steps == preset("tiny").steps


def test_defaults_follow_the_preset_and_the_warm_up_follows_the_steps():
    settings = parse_run_toml('[model]\npreset = "small"\n[training]\nsteps = 1000\n')
    assert settings.optimizer.learning_rate == preset("small").learning_rate
    assert settings.data.tokenizer == "bpe"
    assert settings.optimizer.warmup_steps == 50
    assert parse_run_toml("[training]\nsteps = 10\n").optimizer.warmup_steps == 2


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("", 1e-4),
        ('[training]\ndtype = "bfloat16"\n', 3e-2),
        ('[training]\ndtype = "bfloat16"\n[trust]\ntolerance = 0.5\n', 0.5),
    ],
)
def test_the_tolerance_of_audits_follows_the_dtype_unless_it_is_given(
    text: str, tolerance: float
) -> None:
    assert parse_run_toml(text).trust.tolerance == tolerance


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[training]\nstepz = 3", "[training] has no setting 'stepz'; did you mean 'steps'?"),
        ("[trainin]\nsteps = 3", "there is no section 'trainin'; did you mean [training]?"),
        ("steps = 3", "there is no setting outside a section 'steps'; did you mean [stages]?"),
        ("[run]\nxyzzy = 3", "[run] has no setting 'xyzzy'; it may have name, seed"),
        ("training = 3", "training must be a section; write [training] on a line of its own"),
        ("[training]\nsteps = 'ten'", "[training] steps must be a whole number, not 'ten'"),
        ("[training]\nsteps = 1.5", "[training] steps must be a whole number, not 1.5"),
        ("[training]\nsteps = true", "[training] steps must be a whole number, not True"),
        ("[training]\nsteps = 0", "[training] steps must be at least 1, not 0"),
        ("[data]\nheldout_share = 0.7", "[data] heldout_share must be at most 0.5, not 0.7"),
        (
            "[optimizer]\nlearning_rate = 0",
            "[optimizer] learning_rate must be more than 0, not 0",
        ),
        (
            "[optimizer]\nlearning_rate = nan",
            "[optimizer] learning_rate must be a finite number, not nan",
        ),
        ("[optimizer]\nbeta1 = 1.0", "[optimizer] beta1 must be less than 1, not 1.0"),
        ("[run]\nname = 7", "[run] name must be text in quotes, not 7"),
        ("[run]\nname = ''", "[run] name must have at least 1 character, not ''"),
        (
            "[training]\ndtype = 'float16'",
            "[training] dtype must be 'float32' or 'bfloat16', not 'float16'",
        ),
        (
            "[admission]\nmode = 'closed'",
            "[admission] mode must be 'open', 'token' or 'allow-list', not 'closed'",
        ),
        (
            "[coordinator]\nstore = 'mysql://x'",
            '[coordinator] store must be "sqlite" or an address like "postgresql://',
        ),
        (
            "[coordinator]\nlease_seconds = 0.1",
            "[coordinator] lease_seconds must be at least 1, not 0.1",
        ),
        (
            "[network]\nlisten_port = 70000",
            "[network] listen_port must be at most 65535, not 70000",
        ),
        ("[network]\nannounce = 'x'", "[network] announce must be a list, like [], not 'x'"),
        (
            "[network]\nannounce = [3]",
            "each part of [network] announce must be text in quotes, not 3",
        ),
        ("[data]\nshards_url = 'ftp://x'", "[data] shards_url must be an address that begins with"),
        ("[data]\nshards_url = 'hf://corpus'", "or hf://datasets/OWNER/NAME, not 'hf://corpus'"),
        ("[model]\npreset = 3", "[model] preset must be text in quotes, not 3"),
        ("[model]\npreset = 'huge'", "there is no preset 'huge'; choose one of tiny, small"),
        ("[model]\nlayers = 'x'", "[model] layers must be a whole number, not 'x'"),
        ("[model]\nlayers = 0", "[model] layers must be at least 1, not 0"),
        ("[model]\nheads = 5", "[model] hidden_size must be a multiple of 2 * heads"),
        (
            "[model]\nrope_scaling.factor = 0",
            "[model] rope_scaling.factor must be at least 1, not 0",
        ),
        ("[model]\nrope_scaling = 4", "[model] rope_scaling must be a table, like {}, not 4"),
        ("[model]\nattention_head_size = 3", "must be a multiple of 2, not 3"),
        ("[model]\nattention_bias = 'q'", "attention_bias must be 'none', 'qkv' or 'all', not"),
        ("[model]\ntie_embeddings = 1", "[model] tie_embeddings must be true or false, not 1"),
        ("[http]\nproxies = ['*']", "[http] '*' does not appear to be an IPv4 or IPv6"),
        ("[http]\nproxies = ['10.0.0.1/8']", "[http] 10.0.0.1/8 has host bits set"),
        ("[http]\nkey = 'x'", "[http] certificate and key: one is no use without the other"),
        ("[limits]\nheartbeat_seconds = 9", "[limits] dead_after_seconds must be longer than"),
        (
            "[training]\nevaluation_microbatches = 0\n[evaluation]\nevery_steps = 5",
            "[evaluation] every_steps needs held-out data",
        ),
        ("[training]\nsteps = ten\n", "run.toml is not TOML: Invalid value (at line 2, column 9)"),
        ("[run]\nseed = 9223372036854775808", "[run] seed must be at most 9007199254740991"),
    ],
)
def test_a_mistake_is_one_clear_sentence(text: str, sentence: str):
    with pytest.raises(ConfigurationError) as caught:
        parse_run_toml(text)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert "pydantic" not in message
    assert message.startswith("run.toml") or "preset" in message


def test_a_list_with_a_wrong_part_is_one_sentence():
    with pytest.raises(ConfigurationError) as caught:
        parse_run_toml('[adapters]\ntargets = ["x"]')
    assert str(caught.value).count("[adapters]") == 1
    assert "not 'x'" in str(caught.value)


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        parse_run_toml("[training]\nsteps = 0\n[checkpoint]\nkeep = 0\n")
    assert "[training] steps must be at least 1" in str(caught.value)
    assert "[checkpoint] keep must be at least 1" in str(caught.value)


def test_a_whole_number_may_stand_for_a_number():
    assert parse_run_toml("[optimizer]\nclip_norm = 2").optimizer.clip_norm == 2.0


def test_overrides_are_checked_like_the_file():
    settings = default_settings("tiny", {"stages.count": 3, "training.steps": 5})
    assert (settings.stages.count, settings.training.steps) == (3, 5)
    with pytest.raises(ConfigurationError, match="did you mean 'steps'"):
        default_settings("tiny", {"training.step": 5})
    with pytest.raises(ConfigurationError, match=r"SECTION\.NAME"):
        default_settings("tiny", {"steps": 5})


def test_the_words_of_a_command_line_become_values():
    assert parse_override("training.steps=20") == ("training.steps", 20)
    assert parse_override("optimizer.learning_rate = 1e-3") == ("optimizer.learning_rate", 1e-3)
    assert parse_override("model.tie_embeddings=true") == ("model.tie_embeddings", True)
    assert parse_override("training.dtype=bfloat16") == ("training.dtype", "bfloat16")
    assert parse_override("run.name=a = b") == ("run.name", "a = b")
    assert parse_override("network.announce=['x']") == ("network.announce", ["x"])
    for word in ("steps=20", "training.steps"):
        with pytest.raises(ConfigurationError, match="is not a setting"):
            parse_override(word)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_spelt_as_toml_reads_it(text: str):

    assert tomllib.loads(f"x = {toml_value(text)}")["x"] == text


def manifest_for(settings: RunSettings) -> Manifest:
    return manifest_of(
        name=settings.run.name, model=settings.model.config, stages=stage_ranges(2, 4),
        training=settings.training_config, optimizer=settings.optimizer, limits=settings.limits,
        checkpoint_steps=settings.checkpoint.every_steps, codecs=settings.codecs.config,
    )  # fmt: skip


def test_an_unchanged_file_differs_in_nothing_from_its_manifest():
    settings = default_settings("tiny")
    assert settings_differences(settings, manifest_for(settings)) == []


@pytest.mark.parametrize(
    ("change", "value", "named"),
    [
        ("run.name", "other", "[run] name is 'other' in run.toml but 'my-run'"),
        ("run.seed", 99, "[run] seed is 99 in run.toml but 1 in"),
        ("model.rope_theta", 5.0, "[model] rope_theta is 5.0"),
        ("stages.count", 3, "[stages] count is 3 in run.toml but 2"),
        ("training.steps", 61, "[training] steps is 61 in run.toml but 60"),
        ("training.dtype", "bfloat16", "[training] dtype is 'bfloat16'"),
        ("optimizer.beta2", 0.9, "[optimizer] beta2 is 0.9"),
        ("limits.lease_seconds", 7.0, "[limits] lease_seconds is 7.0"),
        ("codecs.gradient", "none", "[codecs] gradient is 'none' in run.toml but 'int8'"),
        ("checkpoint.every_steps", 7, "[checkpoint] every_steps is 7"),
    ],
)
def test_a_changed_setting_that_the_manifest_fixes_is_named(change: str, value: object, named: str):
    manifest = manifest_for(default_settings("tiny"))
    changed = default_settings("tiny", {change: value})
    differences = settings_differences(changed, manifest)
    assert len(differences) == 1
    assert differences[0].startswith(named)


@pytest.mark.parametrize("change", ["network.listen_port", "checkpoint.keep"])
def test_a_setting_of_this_machine_alone_may_change(change: str):
    manifest = manifest_for(default_settings("tiny"))
    assert settings_differences(default_settings("tiny", {change: 9}), manifest) == []


def test_between_stages_the_cheapest_codec_is_the_default_whose_cost_in_loss_is_within_the_noise():
    default = parse_run_toml("").codecs
    assert (default.activation, default.gradient) == ("int8", "int8")
    table = quality_table()
    assert table.pairs["int8 / int8"].gap_relative <= 0 < table.pairs["int8 / int4"].gap_relative


def test_averages_have_a_codec_of_their_own():
    assert parse_run_toml("").codecs.average == "exact"
    assert parse_run_toml('[codecs]\naverage = "int8"\n').codecs.average == "int8"
    with pytest.raises(ConfigurationError, match=r"\[codecs\] average must be 'exact', 'none'"):
        parse_run_toml('[codecs]\naverage = "int4"\n')


def test_the_largest_values_alone_are_for_gradients():
    assert parse_run_toml('[codecs]\ngradient = "topk"\n').codecs.gradient == "topk"
    with pytest.raises(ConfigurationError, match=r"\[codecs\] activation must be 'none'"):
        parse_run_toml('[codecs]\nactivation = "topk"\n')
