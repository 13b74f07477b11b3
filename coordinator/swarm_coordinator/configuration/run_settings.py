"""The settings of a run: the sections of `run.toml`, which the organiser edits.

Owns the sections, their descriptions and defaults, parsing with one clear sentence for every
mistake, and the differences between a changed file and a signed manifest. Does not access the disk;
stage boundaries and data are made in `run_creation`, the file's text in `configuration.template`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from swarm_coordinator.admission.book import AdmissionMode
from swarm_coordinator.configuration.http_address import parse_address
from swarm_coordinator.configuration.mirror_addresses import ADDRESS_PATTERN
from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MAX_EXACT_INTEGER, PeerId
from swarm_shared.codecs.quality import measured_noise
from swarm_shared.run.codec_sizes import ActivationCodec, AverageCodec, GradientCodec
from swarm_shared.run.manifest import (
    MAX_STEPS,
    CodecsConfig,
    LimitsConfig,
    Manifest,
    OptimizerConfig,
    TokenizerKind,
    TrainingConfig,
    TrainingSection,
)
from swarm_shared.run.model_config import (
    AdapterConfig,
    AttentionBias,
    ComputeDtype,
    ModelConfig,
    Preset,
    RopeScaling,
    preset,
)
from swarm_shared.settings.errors import describe_setting_error, nearest

FILE_NAME = "run.toml"
DEFAULT_PRESET = "tiny"
DEFAULT_SEED = 1
SQLITE = "sqlite"
POSTGRESQL_SCHEMES = ("postgresql://", "postgres://")
PYTHON_STDLIB = "python-stdlib"
"""Data source that needs no files: the source code of Python's standard library."""


class RunSection(FrozenModel):
    name: str = Field(min_length=1, max_length=100, description="Shown to volunteers. (fixed)")
    seed: int = Field(
        ge=0,
        le=MAX_EXACT_INTEGER,
        description="Determines the initial parameters and the order of the data. (fixed)",
    )


class ModelSection(FrozenModel):
    """A preset and the sizes that differ from it; all are checked as one ModelConfig."""

    preset: str
    vocabulary_size: int | None = Field(
        default=None, description="Token ids; a bpe tokenizer is trained to this size."
    )
    hidden_size: int | None = Field(
        default=None, description="Width of the model, a multiple of 2 * heads."
    )
    intermediate_size: int | None = Field(
        default=None, description="Width of the feed-forward layers."
    )
    layers: int | None = None
    heads: int | None = Field(default=None, description="Attention heads.")
    key_value_heads: int | None = Field(
        default=None, description="Heads of keys and values; a divisor of heads."
    )
    sequence_length: int | None = Field(
        default=None, description="Tokens that the model sees at once."
    )
    rope_theta: float | None = Field(default=None, description="Base of the rotary positions.")
    norm_epsilon: float | None = None
    tie_embeddings: bool | None = Field(
        default=None, description="Whether input embedding and output head share their weights."
    )
    attention_head_size: int | None = Field(
        default=None, description="Width of an attention head, or 0 for hidden_size / heads."
    )
    attention_bias: AttentionBias | None = Field(
        default=None,
        description='Biases of attention: "none", "qkv" for queries, keys and values as Qwen2 has '
        'them, or "all" for its output, too.',
    )
    query_key_norm: bool | None = Field(
        default=None,
        description="Whether queries and keys of each head are normalised, as in Qwen3.",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description='Scaling of the rotary positions: {}, { kind = "linear", factor = 4 }, or, as '
        'in Llama 3.1, { kind = "llama3", factor = 8, low_frequency_factor = 1, '
        'high_frequency_factor = 4, original_length = 8192 }; or kind = "yarn", which has an '
        "attention_factor, too.",
    )
    bottleneck_size: int | None = Field(
        default=None,
        description="Width of what crosses a stage boundary, or 0 for all of hidden_size. With a "
        "bottleneck the model is of no family of transformers and cannot be exported.",
    )

    @property
    def config(self) -> ModelConfig:
        """The preset's model with these sizes."""
        return ModelConfig.model_validate(
            preset(self.preset).model.model_dump()
            | self.model_dump(exclude={"preset"}, exclude_none=True)
        )


class StagesSection(FrozenModel):
    count: int = Field(
        ge=1, le=512, description="Stages without a layer are possible at the ends only."
    )


class DataSection(FrozenModel):
    source: str = Field(
        min_length=1,
        description="Path of a file or folder of text, .jsonl, .parquet or .arrow, also as .gz or "
        '.zst, or of a folder of ready shards; "hf://datasets/ORG/NAME@COMMIT/PATH"; or '
        '"python-stdlib".',
    )
    column: str = Field(
        default="text",
        min_length=1,
        description="Column of .parquet and .arrow, and field of .jsonl, that has the text.",
    )
    tokenizer: str = Field(
        min_length=1,
        description='"bytes"; "bpe": byte pairs learned from the training text; or the path of a '
        "tokenizer.json, or of a vocabulary with one token a line.",
    )
    heldout_share: float = Field(
        default=0.05, gt=0, le=0.5, description="Share of the text kept for measuring progress."
    )
    similarity: float = Field(
        default=1.0,
        ge=0.7,
        le=1,
        description="From which similarity on a document counts as a repetition of an earlier one "
        "and is left out; 1 for equal ones only, 0.8 for near duplicates as well.",
    )
    shards_url: str = Field(
        default="",
        pattern=f"^({ADDRESS_PATTERN}( +{ADDRESS_PATTERN}){{0,7}})?$",
        description="Web folder with copies of the files in data/, or up to 8 with spaces between, "
        'so that the coordinator sends proofs only; "" for none. They must answer Range requests, '
        "as public buckets (s3://BUCKET/FOLDER, gs://BUCKET/FOLDER) and data sets "
        "(hf://datasets/OWNER/NAME/FOLDER) do. "
        "Volunteers follow https to public addresses only, unless they allow more.",
    )

    @property
    def tokenizer_kind(self) -> TokenizerKind:
        if self.tokenizer == "bytes":
            return "bytes"
        return "bpe" if self.tokenizer == "bpe" else "file"


class NetworkSection(FrozenModel):
    listen_host: str = Field(
        default="0.0.0.0",
        min_length=1,
        description='Address to listen on; "0.0.0.0" is every IPv4 address of this machine.',
    )
    listen_port: int = Field(
        default=0,
        ge=0,
        le=65_535,
        description="0 picks a free port at the first start and keeps it.",
    )
    announce: tuple[str, ...] = Field(
        default=(),
        description="Further addresses at which volunteers reach the coordinator, for example "
        '["/dns4/train.example.org/tcp/4711"] behind a router.',
    )
    relay: bool = Field(
        default=True,
        description="Carry traffic of volunteers that cannot reach each other directly.",
    )


class CheckpointSection(FrozenModel):
    every_steps: int = Field(default=50, ge=1, le=MAX_STEPS, description="(fixed)")
    keep: int = Field(default=3, ge=1, description="Number of newest checkpoints that are kept.")


class EvaluationSection(FrozenModel):
    """Evaluations of checkpoints by the organiser's machine."""

    every_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_STEPS,
        description="Steps after which the newest checkpoint is evaluated again; 0 for never.",
    )
    prompt: str = Field(
        default="",
        max_length=1000,
        description="What the text begins with that the model then writes.",
    )
    sample_tokens: int = Field(
        default=120, ge=0, le=1000, description="Tokens of that text; 0 for no text."
    )


class CoordinatorSection(FrozenModel):
    store: str = Field(
        default=SQLITE,
        description='"sqlite", in this folder; or "postgresql://user@host/database", a database '
        "of the run's own on a server, which lets a standby coordinator take over.",
    )
    lease_seconds: float = Field(
        default=5.0,
        ge=1,
        le=600,
        description="With PostgreSQL: seconds without a renewal after which a standby takes over "
        "from a coordinator.",
    )

    @model_validator(mode="after")
    def _known_store(self) -> Self:
        if self.store != SQLITE and not self.store.startswith(POSTGRESQL_SCHEMES):
            raise ValueError(
                f'store must be "{SQLITE}" or an address like "postgresql://user@host/database"'
            )
        return self


AUTO: Literal["auto"] = "auto"


class CodecsSection(FrozenModel):
    """`auto` is replaced by names of codecs when the run or its manifest is made."""

    activation: Literal[ActivationCodec, "auto"] = Field(
        default="int8",
        description='"none", "float16", "bfloat16", "int8" (a quarter of the bytes) or "int4" (an '
        'eighth); docs/benchmarks.md lists what each costs in loss: "int8" nothing that could be '
        'measured. Or "auto", here and for the gradient: at the next start, until a step is '
        "applied, it is replaced by the pair that is fastest by the settings below.",
    )
    gradient: Literal[GradientCodec, "auto"] = Field(
        default="int8",
        description='The same, and "topk": the largest sixteenth of a gradient.',
    )
    average: AverageCodec = Field(
        default="exact",
        description='"exact", "none", "float16" or "int8", for the sums of gradients among the '
        'peers of a stage. "exact" rounds each microbatch\'s gradient once, far below what the '
        "optimizer notices, and adds without rounding: on machines that compute alike the run "
        'equals its reference to the bit, however the work is divided. "none" adds float32, up to '
        "rounding. What a lossy one loses depends on how many peers average: replicas stay equal "
        "to the bit, but the run is only near its reference, by about the codec's error.",
    )
    largest_loss_gap: float = Field(
        default_factory=measured_noise,
        ge=0,
        le=1,
        description='What "auto" may cost in held-out loss, relative; the default is the measured '
        "noise from seed to seed.",
    )
    up_mbit_per_second: float = Field(
        default=20.0,
        gt=0,
        le=1e6,
        description='Uplink of volunteers in Mbit/s that "auto" assumes.',
    )

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
        """The codecs that the manifest fixes; `auto` must have been replaced."""
        assert self.activation != AUTO
        assert self.gradient != AUTO
        return CodecsConfig(
            activation=self.activation, gradient=self.gradient, average=self.average
        )


class AdmissionSection(FrozenModel):
    mode: AdmissionMode = Field(
        default="open",
        description='"open": everyone with the invite. "token": everyone with an invite that '
        'carries a valid token (`swarm-coordinator token`). "allow-list": peers on the list '
        "(`swarm-coordinator allow`).",
    )


TOLERANCES: Mapping[ComputeDtype, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Default of `tolerance` by the dtype in which the run computes: honest machines that are unlike
come to 5e-7 and 6e-3 (docs/decisions, number 0036)."""


class TrustSection(FrozenModel):
    """Audits of what volunteers count, and checks of sums."""

    audit_share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Share of the counted microbatches that another volunteer computes again, "
        "drawn secretly. 0: none but those that contradict each other.",
    )
    probation_cells: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="Audits that a new owner must pass. Until then a quarter of its microbatches "
        "are audited, and it judges others only where no other owner can.",
    )
    tolerance: float = Field(
        default=TOLERANCES["float32"],
        ge=0,
        le=1,
        description="Largest relative distance between what two machines compute of the same "
        "microbatch; equal machines have 0. bfloat16 needs a larger one than float32.",
    )
    trusted_owners: tuple[PeerId, ...] = Field(
        default=(),
        max_length=100,
        description="Peer IDs of owners whose audits decide at once, such as your own machine's.",
    )
    check_sums: bool = Field(
        default=True,
        description="Whether members prove in every step that what they took out of an average is "
        "the sum of what all put in; of exact averages only. It costs each step a round trip.",
    )

    on_late_verdict: Literal["go on", "roll back"] = Field(
        default="go on",
        description="What follows when an owner loses an audit and has earlier work in the model "
        'that no passed audit covers. "roll back": the run returns to the checkpoint before it, '
        "but computes no step more than twice for that.",
    )

    @property
    def audit_settings(self) -> AuditSettings:
        return AuditSettings(
            audit_share=self.audit_share,
            probation_cells=self.probation_cells,
            tolerance=self.tolerance,
            trusted_owners=frozenset(self.trusted_owners),
            check_sums=self.check_sums,
            rolls_back=self.on_late_verdict == "roll back",
        )


class RebalancingSection(FrozenModel):
    rule: Literal["throughput", "none"] = Field(
        default="throughput",
        description='"throughput": a move must gain more than it costs. "none": volunteers keep '
        "the stage that they joined with.",
    )
    period_seconds: float = Field(
        default=60.0,
        ge=1,
        le=86_400,
        description="Seconds in which a stage takes part in at most one move.",
    )
    minimum_replicas: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="A move never leaves a stage with fewer volunteers.",
    )


class HttpSection(FrozenModel):
    listen: str = Field(
        default="127.0.0.1:0",
        description='HOST:PORT. "127.0.0.1:0" serves this machine only, at a free port that is '
        'kept; "0.0.0.0:8080" serves every machine (no peer\'s address is shown); "" for none.',
    )
    hosts: tuple[str, ...] = Field(
        default=(),
        description="Names under which a reverse proxy on this machine publishes the dashboard, "
        'such as ["run.example.org"]. At an address of this machine alone other names are refused.',
    )
    proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses or networks of reverse proxies that add each client to "
        'X-Forwarded-For, such as ["127.0.0.1"]; limits then apply to each client.',
    )
    certificate: str = Field(
        default="",
        description="PEM file of a certificate and its chain, in this folder or by its whole path: "
        'serves https instead of http. "" for none.',
    )
    key: str = Field(default="", description="PEM file of the certificate's key.")

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.listen:
            try:
                parse_address(self.listen)
            except ConfigurationError as error:
                raise ValueError(f"listen: {error}") from error
        for proxy in self.proxies:
            ip_network(proxy)  # its ValueError names what is no address
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key: one is no use without the other")
        return self


class RunSettings(FrozenModel):
    """All of run.toml, with every default filled in."""

    run: RunSection = Field(description="Name and seed of the run.")
    model: ModelSection = Field(
        description="The model: a preset, and the sizes that differ from it. (fixed)"
    )
    adapters: AdapterConfig = Field(
        default=AdapterConfig(),
        description="Low-rank adapters (LoRA), for a run that continues from a model: they alone "
        "are trained, and the model is frozen. (fixed)",
    )
    stages: StagesSection = Field(
        description="Into how many stages the model is cut; each volunteer holds one. (fixed)"
    )
    data: DataSection = Field(description="Training text. (fixed)")
    training: TrainingSection = Field(description="Length of the run, and sizes. (fixed)")
    optimizer: OptimizerConfig = Field(
        description="AdamW with linear warm-up, cosine decay and global-norm clipping. (fixed)"
    )
    network: NetworkSection = Field(
        default=NetworkSection(), description="Where volunteers reach the coordinator."
    )
    checkpoint: CheckpointSection = Field(
        default=CheckpointSection(),
        description="Saved states, from which a run continues when no peer has its state any more.",
    )
    evaluation: EvaluationSection = Field(
        default=EvaluationSection(),
        description="Loss on held-out data, and a text by the model, of checkpoints while the run "
        "goes on: computed by this machine, at low priority, with one stage in memory at a time.",
    )
    limits: LimitsConfig = Field(
        default=LimitsConfig(),
        description="Bounds that every peer enforces, so that no remote decides how much memory "
        "is taken. (fixed)",
    )
    codecs: CodecsSection = Field(
        default_factory=CodecsSection,
        description="How tensors are encoded between stages, for slow uplinks. What a codec loses "
        "is part of what the run computes. (fixed)",
    )
    admission: AdmissionSection = Field(
        default=AdmissionSection(), description="Which peers may join."
    )
    coordinator: CoordinatorSection = Field(
        default=CoordinatorSection(), description="Where the coordinator keeps its database."
    )
    trust: TrustSection = Field(
        default=TrustSection(),
        description="Audits: microbatches that are computed again by other volunteers, so that "
        "what is counted was computed.",
    )
    rebalancing: RebalancingSection = Field(
        default=RebalancingSection(),
        description="Moving volunteers to the slowest stage, while training continues.",
    )
    http: HttpSection = Field(
        default=HttpSection(),
        description="The dashboard, its API and metrics, in a process of their own.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.limits.dead_after_seconds <= self.limits.heartbeat_seconds:
            raise ValueError(
                "[limits] dead_after_seconds must be longer than heartbeat_seconds, "
                "or every peer counts as dead between two heartbeats"
            )
        if self.evaluation.every_steps and not self.training.evaluation_microbatches:
            raise ValueError(
                "[evaluation] every_steps needs held-out data: [training] evaluation_microbatches "
                "must be at least 1"
            )
        return self

    @property
    def model_shape(self) -> ModelConfig:
        """The model with its adapters, without the positions of bottlenecks."""
        return ModelConfig.model_validate(
            self.model.config.model_dump() | {"adapters": self.adapters.model_dump()}
        )

    @property
    def training_config(self) -> TrainingConfig:
        return TrainingConfig(seed=self.run.seed, **self.training.model_dump())


_SECTIONS: dict[str, type[FrozenModel]] = {
    name: field.annotation
    for name, field in RunSettings.model_fields.items()
    if isinstance(field.annotation, type)
}


def parse_run_toml(text: str, where: str = FILE_NAME) -> RunSettings:
    """Parse the text of a run.toml; ConfigurationError names what is wrong in `where`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"{where} is not TOML: {error}; correct it there: text needs quotes, and every "
            "setting a line `name = value`"
        ) from error
    return settings_from(values, where)


def default_settings(
    preset_name: str, overrides: Mapping[str, object] | None = None
) -> RunSettings:
    """Return a preset's settings; `overrides` maps dotted names (`training.steps`) to values."""
    values: dict[str, dict[str, object]] = {"model": {"preset": preset_name}}
    for dotted, value in (overrides or {}).items():
        section, dot, key = dotted.partition(".")
        if not dot:
            raise ConfigurationError(
                f"{dotted!r} names no setting; write SECTION.NAME, for example training.steps"
            )
        values.setdefault(section, {})[key] = value
    return settings_from(values, "the settings given")


def settings_from(values: Mapping[str, object], where: str) -> RunSettings:
    """Check names, fill in the preset's defaults, and check values."""
    sections = _checked_names(values, where)
    chosen = preset(_preset_name(sections, where))
    filled = _with_defaults(sections, chosen)
    try:
        settings = RunSettings.model_validate(filled, strict=True)
    except ValidationError as error:
        raise ConfigurationError(_sentences(error, where)) from error
    try:
        _ = settings.model_shape
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
        # TOML has lists only, strict validation needs tuples.
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
    """Merge the file's values over the defaults that depend on the preset or on other settings."""
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
        filled["optimizer"].setdefault("warmup_steps", max(2, steps // 20))
    if filled["training"].get("dtype") == "bfloat16":
        filled["trust"].setdefault("tolerance", TOLERANCES["bfloat16"])
    return filled


def _sentences(error: ValidationError, where: str, section: str | None = None) -> str:
    """Return every validation error as a sentence in the terms of run.toml."""
    details = error.errors(include_url=False)
    return "; ".join(
        _sentence(detail, where, section)
        for detail in details
        # A missing value follows from a section that is reported itself, and a list that is too
        # short from its parts that are.
        if detail["type"] != "missing" and not _has_wrong_parts(detail, details)
    )


def _has_wrong_parts(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    place = detail["loc"]
    return any(len(one["loc"]) > len(place) == 2 and one["loc"][:2] == place for one in details)


def _sentence(detail: ErrorDetails, where: str, section: str | None) -> str:
    path = ([section] if section else []) + [str(part) for part in detail["loc"]]
    if detail["type"] == "value_error":
        place = f"[{path[0]}] " if path else ""
        return f"{where}: {place}{detail.get('ctx', {}).get('error')}"
    name = f"[{path[0]}] {path[1]}" if len(path) > 1 else path[0]
    if len(path) > 2:
        name = f"each part of {name}" if path[2].isdigit() else f"{name}.{path[2]}"
    return f"{where}: {name} {describe_setting_error(detail)}"


def settings_differences(settings: RunSettings, manifest: Manifest) -> list[str]:
    """Return a sentence for each setting in which run.toml differs from the signed manifest.

    The settings of `[data]` are not in the manifest; `durability.run_files` compares them with
    what the run folder's data was made from.
    """
    pairs: list[tuple[str, object, object]] = [
        ("[run] name", settings.run.name, manifest.name),
        ("[stages] count", settings.stages.count, manifest.stage_count),
        ("[checkpoint] every_steps", settings.checkpoint.every_steps, manifest.checkpoint_steps),
    ]
    # The positions of the bottlenecks follow from the stages.
    places = {"bottlenecks": manifest.model.bottlenecks}
    for section, now, fixed in (
        ("model", settings.model.config.model_copy(update=places), manifest.model.base),
        ("adapters", settings.adapters, manifest.model.adapters),
        ("training", settings.training_config, manifest.training),
        ("optimizer", settings.optimizer, manifest.optimizer),
        ("limits", settings.limits, manifest.limits),
        # The settings behind `auto` are not in the manifest.
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
