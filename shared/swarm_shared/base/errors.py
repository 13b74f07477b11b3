"""Every error that this project raises on purpose.

    SwarmError                     exit 1    something failed; the message says what to do
    ├── UsageError                 exit 2    the arguments of a command are wrong
    ├── ConfigurationError         exit 3    run.toml or settings: unknown key, impossible value
    ├── InviteError                exit 4    the invite is damaged, or for another network
    ├── DataError                  exit 5    training data is missing, empty, damaged, not text
    ├── CapacityError              exit 6    no volunteer's (or this machine's) memory can hold it
    ├── StorageError               exit 7    disk full, unwritable folder, damaged checkpoint
    ├── NetworkError               exit 8    port in use, coordinator unreachable, link lost
    │   ├── LinkClosed                       the remote ended the stream
    │   └── LinkTimeout                      the remote did not answer in time
    ├── AdmissionError             exit 9    the run refuses this peer, or the peer is banned
    ├── VersionError               exit 10   the two ends run different versions
    ├── ProtocolError              exit 11   the remote sent something that is not allowed
    │   ├── FrameError                       a frame that is too long, cut short or not decodable
    │   └── SignatureError                   an invalid signature, certificate or hash
    ├── LeadershipError            exit 12   another coordinator serves this run
    ├── DaemonError                exit 13   no daemon runs here, or it does not answer
    └── MachineError               exit 14   this machine has failed its self-test

A message states what was seen, what is needed and what to do. The command line prints it as one
sentence and exits with `exit_code`; a traceback never reaches a user for any of these.
"""

from __future__ import annotations

from typing import ClassVar


class SwarmError(Exception):
    """Base of all errors that are expected to happen and are explained to a person."""

    exit_code: ClassVar[int] = 1


class UsageError(SwarmError):
    """The arguments of a command are wrong."""

    exit_code = 2


class ConfigurationError(SwarmError):
    """A setting has an unknown name or an impossible value."""

    exit_code = 3


class InviteError(SwarmError):
    """An invite is damaged, or the text is not an invite."""

    exit_code = 4


class DataError(SwarmError):
    """Training data is missing, empty, damaged or not text."""

    exit_code = 5


class CapacityError(SwarmError):
    """Something does not fit into any memory on offer."""

    exit_code = 6


class StorageError(SwarmError):
    """The disk is full, a folder cannot be written, or a stored file is damaged."""

    exit_code = 7


class NetworkError(SwarmError):
    """A peer cannot be reached, or a port is not available."""

    exit_code = 8


class LinkClosed(NetworkError):
    """The remote ended the stream, or the connection below it is lost."""


class LinkTimeout(NetworkError):
    """The remote did not answer within the time given."""


class AdmissionError(SwarmError):
    """The run refuses this peer."""

    exit_code = 9


class VersionError(SwarmError):
    """The two ends run different versions."""

    exit_code = 10


class ProtocolError(SwarmError):
    """The remote sent something that is not allowed: its fault, never this side's."""

    exit_code = 11


class FrameError(ProtocolError):
    """A frame is too long, cut short, or not decodable."""


class SignatureError(ProtocolError):
    """A signature, certificate or hash is not valid."""


class LeadershipError(SwarmError):
    """Another coordinator serves this run, or has taken it over."""

    exit_code = 12


class DaemonError(SwarmError):
    """No daemon of this home answers, or it cannot be started."""

    exit_code = 13


class MachineError(SwarmError):
    """This machine does not compute the same each time, or its memory does not keep its content."""

    exit_code = 14
