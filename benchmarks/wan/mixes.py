"""Kinds of links, fleets made of them, and what a fleet trains, from a TOML file.

Rates include headers. `rtt_ms` is the round trip between a machine and the middle of the network;
that between two machines is the sum of both.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.frozen_model import FrozenModel

MIXES = Path(__file__).parent / "mixes.toml"
MBIT = 1e6 / 8
"""Bytes per second."""


class Link(FrozenModel):
    """One machine's link to the network."""

    up_mbit: float = Field(gt=0, le=1000)
    down_mbit: float = Field(gt=0, le=1000)
    rtt_ms: float = Field(default=0.0, ge=0, le=2000)
    jitter_ms: float = Field(default=0.0, ge=0, le=1000)
    """Maximum deviation of each direction's delay, to either side."""
    loss_percent: float = Field(default=0.0, ge=0, le=50)
    """Packet loss in each direction."""

    @property
    def up_bytes_per_second(self) -> float:
        return self.up_mbit * MBIT

    @property
    def down_bytes_per_second(self) -> float:
        return self.down_mbit * MBIT

    def slower(self, times: float) -> Link:
        """Return the link with transfers and delays that take `times` as long."""
        changed = {
            "up_mbit": self.up_mbit / times, "down_mbit": self.down_mbit / times,
            "rtt_ms": times * self.rtt_ms, "jitter_ms": times * self.jitter_ms,
        }  # fmt: skip
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _jitter_fits(self) -> Self:
        if self.jitter_ms > self.rtt_ms / 2:
            raise ValueError("jitter_ms can be half of rtt_ms at most: no packet arrives early")
        return self


class PeerKind(FrozenModel):
    """A group of identical machines."""

    link: str
    count: int = Field(default=1, ge=1, le=64)
    speed: float = Field(default=1.0, gt=0)
    """Compute rate relative to a machine of speed 1."""


class Peer(FrozenModel):
    """One machine of a fleet."""

    link_name: str
    link: Link
    speed: float


class Training(FrozenModel):
    """The run that a fleet trains."""

    stages: int = Field(default=4, ge=2, le=16)
    microbatches_per_step: int = Field(default=16, ge=1, le=1024)
    microbatch_seconds: float = Field(default=0.25, gt=0)
    """Time of a stage's microbatch on a machine of speed 1."""
    settings: dict[str, int | float | str] = Field(default_factory=dict)
    """Further settings of the run by their dotted names, over the benchmark's own
    (`templates.CHANGES`)."""


class MixSection(Training):
    """A mix as written in the file."""

    machines: tuple[PeerKind, ...] = Field(min_length=1)
    times_slower: float = Field(default=1.0, ge=1, le=10)
    """Factor by which computing, transfers and delays take longer than the file says. The programs
    of all machines share this computer's cores, and their overhead then weighs less."""


class Mix(FrozenModel):
    name: str
    peers: tuple[Peer, ...]
    training: Training = Training()


class MixFile(FrozenModel):
    links: dict[str, Link]
    mixes: dict[str, MixSection]

    @model_validator(mode="after")
    def _links_are_known(self) -> Self:
        for mix, section in self.mixes.items():
            for kind in section.machines:
                if kind.link not in self.links:
                    known = ", ".join(sorted(self.links))
                    raise ValueError(f"mix {mix!r} names link {kind.link!r}; there are {known}")
        return self

    def link(self, name: str) -> Link:
        if name not in self.links:
            raise ConfigurationError(f"there is no link {name!r}; the benchmark needs it")
        return self.links[name]

    def mix(self, name: str) -> Mix:
        """Return the mix `name`; raises ConfigurationError with the known names if it is absent."""
        if name not in self.mixes:
            raise ConfigurationError(
                f"there is no mix {name!r}; choose one of {', '.join(sorted(self.mixes))}"
            )
        section = self.mixes[name]
        times = section.times_slower
        peers = [
            Peer(link_name=kind.link, link=self.links[kind.link].slower(times), speed=kind.speed)
            for kind in section.machines
            for _ in range(kind.count)
        ]
        training = Training(
            **section.model_dump(exclude={"machines", "times_slower", "microbatch_seconds"}),
            microbatch_seconds=times * section.microbatch_seconds,
        )
        return Mix(name=name, peers=tuple(peers), training=training)


def read_mixes(path: Path = MIXES) -> MixFile:
    """Read a file of mixes; raises ConfigurationError with the position of an error."""
    try:
        return MixFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigurationError(f"{path}: {place}: {first['msg']}") from error
