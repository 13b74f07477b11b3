"""The types of values that come from other machines, each with its bound; plain values, no I/O.

Every field of a message, certificate, manifest or record that another machine may have written has
one of these types, or one built of them. pydantic checks the bounds while it parses, before a value
is stored anywhere. A test finds all such fields by reflection and rejects a text, list or number
without a bound. Identifiers are types of their own; program code makes them without a check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, NewType

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

MAX_STAGES: Final = 512
"""Most stages of a run, and layers of a model."""
MAX_MICROBATCHES: Final = 65_536
"""Most microbatches of a step."""
MAX_PEERS: Final = 65_536
"""Most peers in a list of all members, or of all revoked peers."""
MAX_ADDRESSES: Final = 32
"""Most addresses of a peer: a machine with several interfaces, both IP versions and some relays."""
MAX_ADDRESS_CHARACTERS: Final = 300
"""Longest multiaddr."""
MAX_SHARDS: Final = 32_768
"""Most files of training data that a manifest lists."""
MAX_MIRRORS: Final = 8
"""Most web folders with copies of the training data."""
MAX_REDUCTION_MEMBERS: Final = 4096
"""Most members of one all-reduce."""
MAX_SAMPLED_BLOCKS: Final = 64
"""Most blocks of a gradient that an auditor compares. Of a lie in a twentieth of the blocks
one is among them with probability 0.96."""
CHECKS_PER_SECRET: Final = 3
"""Checks of sums for which an auditor states digests at once; their seeds follow from a secret."""
MAX_EXACT_INTEGER: Final = 2**53 - 1
"""Largest whole number that JSON readers, SQLite and floats all hold exactly."""
MAX_SENTENCE_CHARACTERS: Final = 500
"""Characters of a sentence for people; program code cuts longer ones."""
MAX_MAGNITUDE: Final = 1e100
"""Largest number accepted from a peer; sums and products over many peers stay finite."""


@dataclass(frozen=True, slots=True)
class ParsedAs:
    """The form that a text must have where it is parsed from JSON, as all messages are.

    Program code has its texts from a key or an earlier message and does not pay for the check again
    with every message that it makes: a roster names ten thousand peers.
    """

    pattern: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.json_or_python_schema(
            core_schema.str_schema(pattern=self.pattern), handler(source)
        )


# ---------------------------------------------------------------- identifiers

PEER_ID_PATTERN: Final = r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$"
RUN_ID_PATTERN: Final = r"^[0-9a-f]{64}$"

PeerId = NewType("PeerId", Annotated[str, ParsedAs(PEER_ID_PATTERN)])
"""A libp2p peer ID of an Ed25519 key in its base58 text form, always 52 characters. It follows from
the peer's public key (`swarm_shared.identity.keys`)."""

RunId = NewType("RunId", Annotated[str, ParsedAs(RUN_ID_PATTERN)])
"""Hex digest naming a run: the hash of its organiser's key and its manifest's immutable part."""

StageIndex = NewType("StageIndex", Annotated[int, Field(ge=0, lt=MAX_STAGES)])
"""Position of a stage in the pipeline; 0 holds the token embedding."""

Step = NewType("Step", Annotated[int, Field(ge=0, le=MAX_EXACT_INTEGER)])
"""Optimizer step, counted from 1. A peer at parameter version v works on step v + 1."""

Version = NewType("Version", Annotated[int, Field(ge=0, le=MAX_EXACT_INTEGER)])
"""Parameter version: the number of optimizer steps applied. 0 is the initialisation."""

MicrobatchIndex = NewType("MicrobatchIndex", Annotated[int, Field(ge=0, lt=MAX_MICROBATCHES)])
"""Index of a microbatch inside its step, 0 ≤ index < microbatches per step."""

Generation = NewType("Generation", Annotated[int, Field(ge=0, le=MAX_EXACT_INTEGER)])
"""Number of a coordinator start; fences off stale messages (design: coordinator)."""

# ---------------------------------------------------------------- numbers

Count = Annotated[int, Field(ge=0, le=MAX_EXACT_INTEGER)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A number whose bounds its field gives."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
UnixSeconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""A rate per second, of bytes, tokens or microbatches."""
Flops = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
FlopsPerByte = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
"""Of a device, its machine balance; of a computation, its arithmetic intensity (Williams et al.
2009, Roofline)."""
Loss = Annotated[float, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE, allow_inf_nan=False)]
"""A loss in nats, of one token or summed over tokens."""
Magnitude = Annotated[float, Field(ge=0, le=MAX_MAGNITUDE, allow_inf_nan=False)]
Norm = Magnitude
"""The norm of a gradient, or its square."""
Credit = Magnitude
"""Tokens times the stage's share of the model's work."""

# ---------------------------------------------------------------- texts

Text = Annotated[str, Field(max_length=MAX_SENTENCE_CHARACTERS)]
"""A sentence for people: a reason, a device's name."""
Address = Annotated[str, Field(max_length=MAX_ADDRESS_CHARACTERS)]
"""A multiaddr."""
Url = Annotated[str, Field(max_length=2_000)]
Envelope = Annotated[str, Field(max_length=8_192)]
"""A signed envelope in base64: a certificate, or a carrier binding."""
ReceiptEnvelope = Annotated[str, Field(max_length=960)]
"""A signed `Receipt` in base64; one has about 810 characters, and at most 920. Those of all stages
fit into one message, so that no peer can sign one that another peer's message has no room for."""
OwnerEnvelope = Annotated[str, Field(max_length=2_000)]
"""An `OwnerBinding` in base64; one has about 340 characters."""
SumEnvelope = Annotated[str, Field(max_length=2**20)]
"""A signed `SumStatement` in base64; with details it has some 50 characters per member."""
ManifestEnvelope = Annotated[str, Field(max_length=4 * 2**20)]
"""The signed manifest in base64."""
Site = Annotated[str, Field(max_length=32)]
"""Opaque name of the network from which the coordinator sees a peer: equal for the members of one
household, and for all within the coordinator's own private network."""
SoftwareVersion = Annotated[str, Field(max_length=50)]
Token = Annotated[str, Field(min_length=1, max_length=255)]
"""The secret of an invite; its length is one byte there."""
DisplayName = Annotated[str, Field(max_length=60)]
"""The name of a peer or team, as its owner chose it."""
ItemName = Annotated[str, Field(max_length=200)]
"""A file that TRANSFER_PROTOCOL serves."""
RunName = Annotated[str, Field(min_length=1, max_length=100)]
ProtocolName = Annotated[str, Field(max_length=100)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(max_length=64)]
"""The digest in a fingerprint of parameters."""
WireDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Hex digest of bytes that crossed a stage's boundary
(`swarm_shared.identity.work_statements.wire_digest`)."""
Seed = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Sixteen random bytes in hex, from which a key is derived."""
LinearDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
"""A linear digest in hex (`swarm_shared.identity.linear_digest`)."""
NormSketch = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{683}=$", max_length=684)]
"""A sketch in base64 (`swarm_shared.identity.norm_sketch`)."""
Instance = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{16})?$")]
"""Random bytes in hex that tell a program that was started from every other one."""
ArithmeticClass = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
"""A digest of fixed work in hex: the same on machines that compute it alike, to the bit."""
CarrierPeerId = Annotated[str, ParsedAs(r"^[1-9A-HJ-NP-Za-km-z]{40,60}$")]
"""The peer ID of a p2pd, whose key may be of any kind."""

# ---------------------------------------------------------------- lists

Addresses = Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]
Mirrors = Annotated[tuple[Url, ...], Field(max_length=MAX_MIRRORS)]
Microbatches = Annotated[tuple[MicrobatchIndex, ...], Field(max_length=MAX_MICROBATCHES)]
SampledBlocks = Annotated[tuple[Count, ...], Field(max_length=MAX_SAMPLED_BLOCKS)]
"""Blocks of a gradient that an auditor asks for."""
Stages = Annotated[tuple[StageIndex, ...], Field(max_length=MAX_STAGES)]
Peers = Annotated[tuple[PeerId, ...], Field(max_length=MAX_PEERS)]
ReceiptEnvelopes = Annotated[tuple[ReceiptEnvelope, ...], Field(max_length=MAX_MICROBATCHES)]
"""Receipts of one peer's own work."""
MicrobatchReceipts = Annotated[tuple[ReceiptEnvelope, ...], Field(max_length=MAX_STAGES)]
"""Receipts of one microbatch, one for each stage."""
MicrobatchPeers = Annotated[tuple[PeerId, ...], Field(max_length=MAX_STAGES)]
"""Peers of one microbatch, at most one for each stage."""
LinearDigests = Annotated[tuple[LinearDigest, ...], Field(max_length=MAX_REDUCTION_MEMBERS)]
"""One for each member of an all-reduce, or for the slice that it sums."""
NormSketches = Annotated[tuple[NormSketch, ...], Field(max_length=CHECKS_PER_SECRET)]
"""One for each check that follows from a secret."""
