"""`run.toml`: what the organiser edits.

Owns the sections and their defaults, reading them with one clear sentence for every mistake,
writing a commented file, and naming what a changed file would change in a run whose manifest is
already signed. Does not touch the disk, and does not decide stage boundaries or make data.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from swarm_coordinator.admission.book import AdmissionMode
from swarm_coordinator.configuration.http_address import parse_address
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.settings_errors import describe_setting_error, nearest
from swarm_shared.codecs.quality import measured_noise
from swarm_shared.run.codec_sizes import ActivationCodec, AverageCodec, GradientCodec
from swarm_shared.run.manifest import (
    CodecsConfig,
    LimitsConfig,
    Manifest,
    OptimizerConfig,
    TrainingConfig,
)
from swarm_shared.run.model_config import ComputeDtype, ModelConfig, Preset, preset

FILE_NAME = "run.toml"
DEFAULT_PRESET = "tiny"
DEFAULT_SEED = 1
SQLITE = "sqlite"
POSTGRESQL_SCHEMES = ("postgresql://", "postgres://")
PYTHON_STDLIB = "python-stdlib"
"""The data source that needs no files: the source of Python's standard library."""


class RunSection(FrozenModel):
    name: str = Field(min_length=1, max_length=100)
    seed: int = Field(ge=0, lt=2**63)


class ModelSection(FrozenModel):
    """A preset, and what is different from it; the sizes are checked as one ModelConfig."""

    preset: str
    vocabulary_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None
    sequence_length: int | None = None
    rope_theta: float | None = None
    norm_epsilon: float | None = None
    tie_embeddings: bool | None = None
    bottleneck_size: int | None = None

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.model_validate(
            preset(self.preset).model.model_dump()
            | self.model_dump(exclude={"preset"}, exclude_none=True)
        )


class StagesSection(FrozenModel):
    count: int = Field(ge=1, le=512)


class DataSection(FrozenModel):
    source: str = Field(min_length=1)
    tokenizer: Literal["bytes", "bpe"]
    heldout_share: float = Field(default=0.05, gt=0, le=0.5)
    shards_url: str = Field(default="", pattern=r"^(https?://\S+)?$")


class TrainingSection(FrozenModel):
    steps: int = Field(ge=1)
    microbatches_per_step: int = Field(ge=1, le=65_536)
    sequences_per_microbatch: int = Field(ge=1, le=65_536)
    dtype: ComputeDtype = "float32"
    evaluation_microbatches: int = Field(default=8, ge=0, le=65_536)
    staleness: Literal[0, 1] = 0


class NetworkSection(FrozenModel):
    listen_host: str = Field(default="0.0.0.0", min_length=1)
    listen_port: int = Field(default=0, ge=0, le=65_535)
    announce: tuple[str, ...] = ()
    relay: bool = True


class CheckpointSection(FrozenModel):
    every_steps: int = Field(default=50, ge=1)
    keep: int = Field(default=3, ge=1)


class CoordinatorSection(FrozenModel):
    store: str = SQLITE
    lease_seconds: float = Field(default=5.0, ge=1, le=600)

    @model_validator(mode="after")
    def _known_store(self) -> Self:
        if self.store != SQLITE and not self.store.startswith(POSTGRESQL_SCHEMES):
            raise ValueError(
                f'store must be "{SQLITE}" or an address like "postgresql://user@host/database"'
            )
        return self


AUTO: Literal["auto"] = "auto"


class CodecsSection(FrozenModel):
    """`auto` is a request: making the run or its manifest puts names of codecs in its place."""

    activation: Literal[ActivationCodec, "auto"] = "int8"
    gradient: Literal[GradientCodec, "auto"] = "int8"
    average: AverageCodec = "exact"
    largest_loss_gap: float = Field(default_factory=measured_noise, ge=0, le=1)
    up_mbit_per_second: float = Field(default=20.0, gt=0, le=1e6)

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.activation == AUTO) != (self.gradient == AUTO):
            raise ValueError('activation and gradient are chosen together: write "auto" for both')
        return self

    @property
    def needs_selection(self) -> bool:
        return self.activation == AUTO

    @property
    def config(self) -> CodecsConfig:
        """What the manifest fixes; nothing may be left to be chosen."""
        assert self.activation != AUTO
        assert self.gradient != AUTO
        return CodecsConfig(
            activation=self.activation, gradient=self.gradient, average=self.average
        )


class AdmissionSection(FrozenModel):
    mode: AdmissionMode = "open"


class RebalancingSection(FrozenModel):
    rule: Literal["throughput", "none"] = "throughput"
    period_seconds: float = Field(default=60.0, ge=1, le=86_400)
    minimum_replicas: int = Field(default=1, ge=1, le=10_000)


class HttpSection(FrozenModel):
    listen: str = "127.0.0.1:0"

    @model_validator(mode="after")
    def _an_address(self) -> Self:
        if self.listen:
            try:
                parse_address(self.listen)
            except ConfigurationError as error:
                raise ValueError(f"listen: {error}") from error
        return self


class RunSettings(FrozenModel):
    """All of run.toml, with every default filled in."""

    run: RunSection
    model: ModelSection
    stages: StagesSection
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerConfig
    network: NetworkSection = NetworkSection()
    checkpoint: CheckpointSection = CheckpointSection()
    limits: LimitsConfig = LimitsConfig()
    codecs: CodecsSection = Field(default_factory=CodecsSection)
    admission: AdmissionSection = AdmissionSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    rebalancing: RebalancingSection = RebalancingSection()
    http: HttpSection = HttpSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.limits.dead_after_seconds <= self.limits.heartbeat_seconds:
            raise ValueError(
                "[limits] dead_after_seconds must be longer than heartbeat_seconds, "
                "or every peer counts as dead between two heartbeats"
            )
        return self

    @property
    def training_config(self) -> TrainingConfig:
        return TrainingConfig(seed=self.run.seed, **self.training.model_dump())


_SECTIONS: dict[str, type[FrozenModel]] = {
    "run": RunSection, "model": ModelSection, "stages": StagesSection, "data": DataSection,
    "training": TrainingSection, "optimizer": OptimizerConfig, "network": NetworkSection,
    "checkpoint": CheckpointSection, "limits": LimitsConfig, "codecs": CodecsSection,
    "admission": AdmissionSection,
    "coordinator": CoordinatorSection,
    "rebalancing": RebalancingSection, "http": HttpSection,
}  # fmt: skip


def parse_run_toml(text: str, where: str = FILE_NAME) -> RunSettings:
    """The settings in a file's text; ConfigurationError names what is wrong in `where`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"{where} is not TOML: {error}; correct it there: text needs quotes, and every "
            "setting a line `name = value`"
        ) from error
    return settings_from(values, where)


def default_settings(
    preset_name: str,
    *,
    name: str = "my-run",
    source: str = PYTHON_STDLIB,
    stages: int | None = None,
    overrides: Mapping[str, object] | None = None,
) -> RunSettings:
    """A preset's settings; `overrides` maps dotted names (`training.steps`) to values."""
    values: dict[str, dict[str, object]] = {
        "run": {"name": name}, "model": {"preset": preset_name}, "data": {"source": source},
    }  # fmt: skip
    if stages is not None:
        values["stages"] = {"count": stages}
    for dotted, value in (overrides or {}).items():
        section, dot, key = dotted.partition(".")
        if not dot:
            raise ConfigurationError(
                f"{dotted!r} names no setting; write SECTION.NAME, for example training.steps"
            )
        values.setdefault(section, {})[key] = value
    return settings_from(values, "the settings given")


def settings_from(values: Mapping[str, object], where: str) -> RunSettings:
    """Checks names, fills defaults from the preset, checks values."""
    sections = _checked_names(values, where)
    chosen = preset(_preset_name(sections, where))
    filled = _with_defaults(sections, chosen)
    try:
        settings = RunSettings.model_validate(filled, strict=True)
    except ValidationError as error:
        raise ConfigurationError(_sentences(error, where)) from error
    try:
        _ = settings.model.config
    except ValidationError as error:
        raise ConfigurationError(_sentences(error, where, section="model")) from error
    return settings


def _checked_names(values: Mapping[str, object], where: str) -> dict[str, dict[str, object]]:
    sections: dict[str, dict[str, object]] = {}
    for section, content in values.items():
        if section not in _SECTIONS:
            shape = "section" if isinstance(content, Mapping) else "setting outside a section"
            raise ConfigurationError(
                f"{where}: there is no {shape} {section!r}{nearest(section, _SECTIONS, '[{}]')}"
            )
        if not isinstance(content, Mapping):
            raise ConfigurationError(
                f"{where}: {section} must be a section; write [{section}] on a line of its own"
            )
        known = _SECTIONS[section].model_fields
        for key, value in content.items():
            if key not in known:
                raise ConfigurationError(
                    f"{where}: [{section}] has no setting {key!r}{nearest(key, known)}"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(
                    f"{where}: [{section}] {key} must be a finite number, not {value}"
                )
        # TOML knows lists only, strict checking wants the tuple that it is.
        sections[section] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in content.items()
        }
    return sections


def _preset_name(sections: Mapping[str, Mapping[str, object]], where: str) -> str:
    name = sections.get("model", {}).get("preset", DEFAULT_PRESET)
    if not isinstance(name, str):
        raise ConfigurationError(f"{where}: [model] preset must be text in quotes, not {name!r}")
    return name


def _with_defaults(
    sections: Mapping[str, Mapping[str, object]], chosen: Preset
) -> dict[str, dict[str, object]]:
    """What the file says, over the defaults that depend on the preset or on another setting."""
    defaults: dict[str, dict[str, object]] = {
        "run": {"name": "my-run", "seed": DEFAULT_SEED},
        "model": {"preset": DEFAULT_PRESET},
        "stages": {"count": chosen.stages},
        "data": {"source": PYTHON_STDLIB, "tokenizer": chosen.tokenizer},
        "training": {
            "steps": chosen.steps,
            "microbatches_per_step": chosen.microbatches_per_step,
            "sequences_per_microbatch": chosen.sequences_per_microbatch,
        },
        "optimizer": {"learning_rate": chosen.learning_rate},
    }
    filled = {name: defaults.get(name, {}) | dict(sections.get(name, {})) for name in _SECTIONS}
    steps = filled["training"]["steps"]
    if isinstance(steps, int):
        filled["optimizer"].setdefault("warmup_steps", default_warmup_steps(steps))
    return filled


def default_warmup_steps(steps: int) -> int:
    return max(2, steps // 20)


def _sentences(error: ValidationError, where: str, section: str | None = None) -> str:
    """Every complaint as a sentence, in the words of run.toml and not of the checking library."""
    return "; ".join(
        _sentence(detail, where, section)
        for detail in error.errors(include_url=False)
        # What depends on a section that is wrong itself.
        if detail["type"] != "missing"
    )


def _sentence(detail: ErrorDetails, where: str, section: str | None) -> str:
    path = ([section] if section else []) + [str(part) for part in detail["loc"]]
    if detail["type"] == "value_error":
        place = f"[{path[0]}] " if path else ""
        return f"{where}: {place}{detail.get('ctx', {}).get('error')}"
    name = f"[{path[0]}] {path[1]}" if len(path) > 1 else path[0]
    if len(path) > 2:
        name = f"each part of {name}"
    return f"{where}: {name} {describe_setting_error(detail)}"


def settings_differences(settings: RunSettings, manifest: Manifest) -> list[str]:
    """Settings that the signed manifest fixes and that run.toml now says otherwise.

    `[data] source` and `heldout_share` are not in the manifest; `stored_run` compares them with
    what the run folder's data was made from.
    """
    pairs: list[tuple[str, object, object]] = [
        ("[run] name", settings.run.name, manifest.name),
        ("[stages] count", settings.stages.count, manifest.stage_count),
        ("[data] tokenizer", settings.data.tokenizer, manifest.data.tokenizer),
        ("[checkpoint] every_steps", settings.checkpoint.every_steps, manifest.checkpoint_steps),
    ]
    # Where the bottlenecks are follows from the stages.
    places = {"bottlenecks": manifest.model.bottlenecks}
    for section, now, fixed in (
        ("model", settings.model.config.model_copy(update=places), manifest.model),
        ("training", settings.training_config, manifest.training),
        ("optimizer", settings.optimizer, manifest.optimizer),
        ("limits", settings.limits, manifest.limits),
        # What `auto` chooses by is not in the manifest.
        ("codecs", settings.codecs, manifest.codecs),
    ):
        for field in type(fixed).model_fields:
            home = "run" if field == "seed" else section
            pairs.append((f"[{home}] {field}", getattr(now, field), getattr(fixed, field)))
    return [
        f"{name} is {now!r} in {FILE_NAME} but {fixed!r} in the run's manifest"
        for name, now, fixed in pairs
        if now != fixed
    ]


def parse_codec(text: str) -> dict[str, str]:
    """`int8/int4` of a command line, or one name for both, as settings."""
    activation, slash, gradient = (part.strip() for part in text.partition("/"))
    return {
        "codecs.activation": activation,
        "codecs.gradient": gradient if slash else activation,
    }


def parse_override(text: str) -> tuple[str, object]:
    """`training.steps=20` of a command line as ("training.steps", 20); a bare word is text."""
    name, equals, spelt = text.partition("=")
    if not equals or "." not in name:
        raise ConfigurationError(
            f"{text!r} is not a setting; write SECTION.NAME=VALUE, for example training.steps=20"
        )
    try:
        parsed = tomllib.loads(f"value = {spelt.strip()}")
    except tomllib.TOMLDecodeError:
        return name.strip(), spelt.strip()
    return name.strip(), parsed["value"]
