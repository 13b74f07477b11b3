"""The frames of yamux 1.0.0: a header of twelve bytes, followed by data for type DATA.

    version u8 (0) | type u8 | flags u16 | stream u32 | length u32     (big endian)

The length is the data's for DATA, a credit for WINDOW_UPDATE, a number to be echoed for PING, and a
reason for GO_AWAY (github.com/hashicorp/yamux/blob/master/spec.md).
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

from libp2p.stream_muxer.exceptions import MuxedStreamError

from swarm_shared.network.libp2p.noise_channel import MAX_PLAINTEXT_BYTES

HEADER = struct.Struct(">BBHII")
HEADER_BYTES = HEADER.size
MAX_FRAME_PAYLOAD_BYTES = MAX_PLAINTEXT_BYTES - HEADER_BYTES
"""Payload of a frame that just fits one Noise message and is encrypted and sent in one piece."""


class FrameType(IntEnum):
    """The types of frames, with the numbers of the yamux specification."""

    DATA = 0
    WINDOW_UPDATE = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    """The flags of frames, with the bits of the yamux specification."""

    NONE = 0
    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


# Plain integers for the code that runs once per frame.
SYN, FIN, RST = int(Flag.SYN), int(Flag.FIN), int(Flag.RST)


class YamuxViolation(MuxedStreamError):  # type: ignore[misc]
    """The remote violated the protocol."""


def control_frame(kind: FrameType, flags: Flag, stream_id: int, value: int) -> bytes:
    """A frame without payload; the meaning of `value` depends on `kind`."""
    return HEADER.pack(0, kind, flags, stream_id, value)


def data_header(stream_id: int, size: int) -> bytes:
    """The header of a data frame without flags, with `size` bytes of payload."""
    return HEADER.pack(0, 0, 0, stream_id, size)
