"""All preferences of a volunteer: name, unit, bounds, default, and meaning.

The names are BOINC's in British spelling, with the unit in the name, because users know them. The
defaults never stop a machine without battery, display and user. docs/preferences.md and the
comments in the file are generated from this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from swarm_client.preferences.hours import WEEKDAYS, Hours, parse_window
from swarm_shared.base.frozen_model import FrozenModel

VERSION = 1
"""Version of the file. A newer one is refused: it may contain restrictions that this program would
ignore."""

WHEN, NETWORK_WHEN, CPU, MEMORY, NETWORK, GPU = (
    "When to run", "When to use the network", "Processor", "Memory and disk", "Network", "GPUs",
)  # fmt: skip
GROUPS = (WHEN, NETWORK_WHEN, CPU, MEMORY, NETWORK, GPU)

MIN_BYTES_PER_SECOND = 64 * 1024
"""Lowest limit in bytes per second. Below it heartbeats and activations on one connection delay
each other beyond their timeouts."""
MIN_CPU_PERCENT = 5
"""Lowest duty cycle in percent. Below it the rest after a computation is as long as the timeout of
a hanging worker."""


def _window(text: str) -> str:
    parse_window(text)
    return text


def _off_or_from(least: float) -> AfterValidator:
    """A validator: a value between zero and the least useful one is a mistake."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"must be 0 (no limit) or at least {least:g}")
        return value

    return AfterValidator(check)


WindowText = Annotated[str, Field(max_length=40), AfterValidator(_window)]
BytesPerSecond = Annotated[int, Field(ge=0, le=2**40), _off_or_from(MIN_BYTES_PER_SECOND)]
Gib = Annotated[float, Field(ge=0, le=2**20), _off_or_from(0.01)]
CpuAbove = Annotated[float, Field(ge=0, le=100), _off_or_from(1)]
Celsius = Annotated[float, Field(ge=0, le=120), _off_or_from(30)]
AppName = Annotated[str, Field(min_length=1, max_length=200)]


def _preference(group: str, default: Any, text: str, **bounds: Any) -> Any:
    return Field(default=default, description=text, json_schema_extra={"group": group}, **bounds)


class Section(FrozenModel):
    """Strict: "yes" is not true, and 1.5 cores are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuPreferences(Section):
    """The preferences of one GPU, or of all GPUs without values of their own."""

    use: bool = _preference(GPU, True, "Whether this GPU may compute at all.")
    vram_gib: Gib = _preference(GPU, 0.0, "Maximum GiB of its memory to use; 0: no limit.")
    temperature_ceiling_celsius: Celsius = _preference(
        GPU, 90.0, "Temperature at which it pauses; 0: no limit."
    )
    temperature_hysteresis_celsius: float = _preference(
        GPU, 10.0, "It continues when it is this much cooler than the ceiling.", ge=1, le=60
    )
    duty_cycle_percent: float = _preference(
        GPU, 100.0, "Percentage of the time that it computes.", ge=MIN_CPU_PERCENT, le=100
    )


MAX_DATA_GIB = 16
"""Largest cache of training data: each of its ranges of 16 KiB takes 200 bytes of memory."""


class Preferences(Section):
    """All preferences, with their defaults."""

    run_on_batteries: bool = _preference(
        WHEN, False, "Compute while this machine runs on battery power."
    )
    run_if_user_active: bool = _preference(
        WHEN, True, "Compute on the processor while this machine is in use."
    )
    run_gpu_if_user_active: bool = _preference(
        WHEN, False, "Compute on a GPU while this machine's display is in use. Terminal sessions "
        "(ssh) do not count here.",
    )  # fmt: skip
    idle_minutes: float = _preference(
        WHEN, 3.0, "Minutes without a key or mouse movement after which it is not in use.",
        ge=0.05, le=1440,
    )  # fmt: skip
    suspend_if_cpu_above_percent: CpuAbove = _preference(
        WHEN,
        0.0,
        "Pause while other programs use more than this percentage of all cores; 0: never.",
    )
    hours: WindowText = _preference(
        WHEN, "always", 'Hours of the day in which to compute: "always", "never", or like '
        '"22:00-06:30", which ends on the next morning.',
    )  # fmt: skip
    hours_on: dict[str, WindowText] = _preference(
        WHEN, {}, "Other hours on some days: monday, tuesday, … sunday. A window belongs to the "
        "day on which it begins.",
    )  # fmt: skip
    exclusive_apps: tuple[AppName, ...] = _preference(
        WHEN, (), "Pause while one of these programs runs, by the name of its process; case does "
        'not matter, and neither does ".exe".', max_length=200,
    )  # fmt: skip
    exclusive_gpu_apps: tuple[AppName, ...] = _preference(
        WHEN, (), "The same, but only for computing on a GPU.", max_length=200
    )

    network_hours: WindowText = _preference(
        NETWORK_WHEN, "always", "Hours of the day in which to use the network, as for `hours`. "
        "Training needs the network, so outside of them everything pauses.",
    )  # fmt: skip
    network_hours_on: dict[str, WindowText] = _preference(
        NETWORK_WHEN, {}, "Other network hours on some days."
    )

    max_cores: int = _preference(
        CPU, 0, "Maximum number of processor cores to use; 0: all.", ge=0, le=4096
    )
    cpu_percent: float = _preference(
        CPU, 100.0, "Percentage of the time that the processor computes; it rests in between.",
        ge=MIN_CPU_PERCENT, le=100,
    )  # fmt: skip
    nice: int = _preference(
        CPU, 10, "Priority given to other programs: 0 none, 19 always. Running processes can be "
        "given a lower priority, but not a higher one, before the next start.", ge=0, le=19,
    )  # fmt: skip

    memory_percent_busy: float = _preference(
        MEMORY, 50.0, "Maximum percentage of this machine's memory to use while its display is in "
        "use.",
        ge=0.1, le=100,
    )  # fmt: skip
    memory_percent_idle: float = _preference(
        MEMORY,
        90.0,
        "The same while it is not in use, and on a machine without a display.",
        ge=0.1,
        le=100,
    )
    disk_gib: Gib = _preference(
        MEMORY, 0.0, "Maximum GiB of disk space for data and states; 0: no limit."
    )
    data_gib: float = _preference(
        MEMORY, 2.0, "Maximum GiB of training data to keep, and never more than half of "
        "`disk_gib`; 0: keep none, and fetch each range when it is needed. Read when a run is "
        "joined.", ge=0, le=MAX_DATA_GIB,
    )  # fmt: skip
    disk_leave_free_gib: Gib = _preference(MEMORY, 1.0, "GiB to keep free on that disk.")

    upload_bytes_per_second: BytesPerSecond = _preference(
        NETWORK, 0, f"Maximum bytes per second to send, over all connections; 0: no limit, "
        f"otherwise at least {MIN_BYTES_PER_SECOND}.",
    )  # fmt: skip
    download_bytes_per_second: BytesPerSecond = _preference(NETWORK, 0, "The same for receiving.")
    transfer_gib: Gib = _preference(
        NETWORK, 0.0, "Maximum GiB to send and receive in total in `transfer_days`; 0: no limit."
    )
    transfer_days: int = _preference(
        NETWORK, 30, "Days to which `transfer_gib` applies, including today.", ge=1, le=366
    )
    private_web_downloads: bool = _preference(
        NETWORK, False, "Follow a run's web addresses of training data over http, too, and into "
        "private networks and this machine. Otherwise only https to public addresses is used, and "
        "the coordinator sends what cannot be fetched so. Read when a run is joined.",
    )  # fmt: skip

    gpu: dict[str, GpuPreferences] = _preference(
        GPU,
        {},
        "A table for each GPU by its number, as [gpu.0], and [gpu.all] for the remaining ones.",
    )

    @field_validator("hours_on", "network_hours_on")
    @classmethod
    def _days(cls, value: dict[str, str]) -> dict[str, str]:
        for day in value:
            if day not in WEEKDAYS:
                raise ValueError(f"must name days in English ({', '.join(WEEKDAYS)})")
        return value

    @field_validator("gpu")
    @classmethod
    def _gpus(cls, value: dict[str, GpuPreferences]) -> dict[str, GpuPreferences]:
        for name in value:
            if name != "all" and not (name.isdecimal() and len(name) <= 3):
                raise ValueError("must have tables named by a GPU's number or all, like [gpu.0]")
        return value

    @cached_property
    def running_hours(self) -> Hours:
        return Hours.of(self.hours, self.hours_on)

    @cached_property
    def networking_hours(self) -> Hours:
        return Hours.of(self.network_hours, self.network_hours_on)

    def for_gpu(self, index: int) -> GpuPreferences:
        """The values set for this GPU, else for all, else the defaults; each value by itself."""
        common = self.gpu.get("all", GpuPreferences())
        gpu = self.gpu.get(str(index))
        if gpu is None:
            return common
        values: Mapping[str, Any] = {name: getattr(gpu, name) for name in gpu.model_fields_set}
        return common.model_copy(update=dict(values))

    @property
    def limits_transport(self) -> bool:
        """Whether bytes are counted or limited: then none may use a transport where they
        are not."""
        return bool(
            self.upload_bytes_per_second or self.download_bytes_per_second or self.transfer_gib
        )
