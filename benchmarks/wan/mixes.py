"""What lines people have: kinds of links, and fleets made of them, read from a TOML file.

Rates are what the line carries, headers included. `rtt_ms` is the round trip between a machine and
the middle of the network: two machines are the sum of theirs apart.
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
    """One machine's line to the network."""

    up_mbit: float = Field(gt=0, le=1000)
    down_mbit: float = Field(gt=0, le=1000)
    rtt_ms: float = Field(default=0.0, ge=0, le=2000)
    jitter_ms: float = Field(default=0.0, ge=0, le=1000)
    """The delay of each direction swings by so much to either side."""
    loss_percent: float = Field(default=0.0, ge=0, le=50)
    """Of packets, in each direction."""

    @property
    def up_bytes_per_second(self) -> float:
        return self.up_mbit * MBIT

    @property
    def down_bytes_per_second(self) -> float:
        return self.down_mbit * MBIT

    @model_validator(mode="after")
    def _jitter_fits(self) -> Self:
        if self.jitter_ms > self.rtt_ms / 2:
            raise ValueError("jitter_ms can be half of rtt_ms at most: no packet arrives early")
        return self


class PeerKind(FrozenModel):
    """Some machines alike."""

    link: str
    count: int = Field(default=1, ge=1, le=64)
    speed: float = Field(default=1.0, gt=0)
    """How fast it computes, over the benchmark's ordinary peer."""


class Peer(FrozenModel):
    """One machine of a fleet."""

    link_name: str
    link: Link
    speed: float


class Mix(FrozenModel):
    name: str
    peers: tuple[Peer, ...]


class MixFile(FrozenModel):
    links: dict[str, Link]
    mixes: dict[str, tuple[PeerKind, ...]]

    @model_validator(mode="after")
    def _links_are_known(self) -> Self:
        for mix, kinds in self.mixes.items():
            if not kinds:
                raise ValueError(f"mix {mix!r} has no peers")
            for kind in kinds:
                if kind.link not in self.links:
                    known = ", ".join(sorted(self.links))
                    raise ValueError(f"mix {mix!r} names link {kind.link!r}; there are {known}")
        return self

    def link(self, name: str) -> Link:
        if name not in self.links:
            raise ConfigurationError(f"there is no link {name!r}; the benchmark needs it")
        return self.links[name]

    def mix(self, name: str) -> Mix:
        """ConfigurationError that lists the names when there is none of this one."""
        if name not in self.mixes:
            raise ConfigurationError(
                f"there is no mix {name!r}; choose one of {', '.join(sorted(self.mixes))}"
            )
        peers = [
            Peer(link_name=kind.link, link=self.links[kind.link], speed=kind.speed)
            for kind in self.mixes[name]
            for _ in range(kind.count)
        ]
        return Mix(name=name, peers=tuple(peers))


def read_mixes(path: Path = MIXES) -> MixFile:
    """ConfigurationError that says where the file is wrong."""
    try:
        return MixFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigurationError(f"{path}: {place}: {first['msg']}") from error
