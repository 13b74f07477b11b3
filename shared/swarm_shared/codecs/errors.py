"""The error of codecs."""

from __future__ import annotations

from swarm_shared.base.errors import ProtocolError


class CodecError(ProtocolError):
    """Bytes that no sender of this codec writes, or a tensor that no codec can encode."""
