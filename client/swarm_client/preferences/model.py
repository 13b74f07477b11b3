"""Every preference of a volunteer: name, unit, bounds, default, and what it means.

The names are BOINC's in our spelling, with the unit in the name, because people know them. The
defaults never stop a machine that has no battery, no display and no user at it. The page
docs/preferences.md and the comments in the file are made from this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from swarm_client.preferences.hours import WEEKDAYS, Hours, parse_window
from swarm_shared.base.frozen_model import FrozenModel

VERSION = 1
"""Of the file. A newer one is refused: it may restrict what this program would then use."""

WHEN, NETWORK_WHEN, CPU, MEMORY, NETWORK, GPU = (
    "When to run", "When to use the network", "Processor", "Memory and disk", "Network", "GPUs",
)  # fmt: skip
GROUPS = (WHEN, NETWORK_WHEN, CPU, MEMORY, NETWORK, GPU)

MIN_BYTES_PER_SECOND = 64 * 1024
"""Below it heartbeats and activations of one connection hold each other up beyond time limits."""
MIN_CPU_PERCENT = 5
"""Below it a pause after a computation is as long as the silence of a worker that hangs."""


def _window(text: str) -> str:
    parse_window(text)
    return text


def _off_or_from(least: float) -> AfterValidator:
    """What lies between nothing and the least that makes sense is a slip of the pen."""

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
    """Strict: "yes" is not true, and 1.5 cores are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuPreferences(Section):
    """Of one GPU, or of all that have no words of their own."""

    use: bool = _preference(GPU, True, "Whether this GPU may compute at all.")
    vram_gib: Gib = _preference(
        GPU, 0.0, "GiB of its memory that may be used at most; 0: no limit."
    )
    temperature_ceiling_celsius: Celsius = _preference(
        GPU, 90.0, "At this temperature it pauses; 0: at none."
    )
    temperature_hysteresis_celsius: float = _preference(
        GPU, 10.0, "It goes on when it is that much cooler than the ceiling.", ge=1, le=60
    )
    duty_cycle_percent: float = _preference(
        GPU, 100.0, "Share of the time that it computes.", ge=MIN_CPU_PERCENT, le=100
    )


class Preferences(Section):
    """All of them, with the defaults of a machine whose owner has said nothing."""

    run_on_batteries: bool = _preference(
        WHEN, False, "Compute while this machine runs on batteries."
    )
    run_if_user_active: bool = _preference(
        WHEN, True, "Compute on the processor while somebody uses this machine."
    )
    run_gpu_if_user_active: bool = _preference(
        WHEN, False, "Compute on a GPU while somebody sits at this machine's display. A user of a "
        "terminal (ssh) does not count here.",
    )  # fmt: skip
    idle_minutes: float = _preference(
        WHEN, 3.0, "So long without a key or a mouse movement, and nobody uses it any more.",
        ge=0.05, le=1440,
    )  # fmt: skip
    suspend_if_cpu_above_percent: CpuAbove = _preference(
        WHEN, 0.0, "Pause while other programs use more than this share of all cores; 0: never."
    )
    hours: WindowText = _preference(
        WHEN, "always", 'Times of the day to compute at: "always", "never", or like '
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
        WHEN, (), "The same for computing on a GPU only.", max_length=200
    )

    network_hours: WindowText = _preference(
        NETWORK_WHEN, "always", "Times of the day to use the network at, as for `hours`. Training "
        "needs the network, so outside of them everything pauses.",
    )  # fmt: skip
    network_hours_on: dict[str, WindowText] = _preference(
        NETWORK_WHEN, {}, "Other network hours on some days."
    )

    max_cores: int = _preference(CPU, 0, "Processor cores to use at most; 0: all.", ge=0, le=4096)
    cpu_percent: float = _preference(
        CPU, 100.0, "Share of the time that the processor computes for a run; it rests in between.",
        ge=MIN_CPU_PERCENT, le=100,
    )  # fmt: skip
    nice: int = _preference(
        CPU, 10, "How far other programs go first: 0 not at all, 19 always. What runs already can "
        "be made to give way more, but not less, before the next start.", ge=0, le=19,
    )  # fmt: skip

    memory_percent_busy: float = _preference(
        MEMORY, 50.0, "Share of this machine's memory to use at most while somebody sits at its "
        "display.",
        ge=1, le=100,
    )  # fmt: skip
    memory_percent_idle: float = _preference(
        MEMORY,
        90.0,
        "The same while nobody does, and on a machine without a display.",
        ge=1,
        le=100,
    )
    disk_gib: Gib = _preference(
        MEMORY, 0.0, "GiB of disk for data and states at most; 0: no limit."
    )
    disk_leave_free_gib: Gib = _preference(MEMORY, 1.0, "GiB that stay free on that disk.")

    upload_bytes_per_second: BytesPerSecond = _preference(
        NETWORK, 0, f"Bytes a second to send at most, over all connections; 0: no limit, otherwise "
        f"at least {MIN_BYTES_PER_SECOND}.",
    )  # fmt: skip
    download_bytes_per_second: BytesPerSecond = _preference(
        NETWORK, 0, "The same for what is received."
    )
    transfer_gib: Gib = _preference(
        NETWORK, 0.0, "GiB to send and receive, both together, in `transfer_days`; 0: no limit."
    )
    transfer_days: int = _preference(
        NETWORK, 30, "Days that `transfer_gib` is for, today included.", ge=1, le=366
    )

    gpu: dict[str, GpuPreferences] = _preference(
        GPU, {}, "A table for each GPU by its number, as [gpu.0], and [gpu.all] for the others."
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
        """What was said of this GPU, else of all, else the default; each word for itself."""
        common = self.gpu.get("all", GpuPreferences())
        own = self.gpu.get(str(index))
        if own is None:
            return common
        said: Mapping[str, Any] = {name: getattr(own, name) for name in own.model_fields_set}
        return common.model_copy(update=dict(said))

    @property
    def limits_transport(self) -> bool:
        """Whether bytes are counted or held back on the way: then none may pass elsewhere."""
        return bool(
            self.upload_bytes_per_second or self.download_bytes_per_second or self.transfer_gib
        )
