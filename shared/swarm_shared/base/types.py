"""The types of identifiers that cross module boundaries; plain values, no I/O."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer ID in its base58 text form; it follows from the peer's Ed25519 public key."""

RunId = NewType("RunId", str)
"""Hex digest naming a run: the hash of its organiser's key and its manifest's immutable part."""

StageIndex = NewType("StageIndex", int)
"""Position of a stage in the pipeline; 0 holds the token embedding."""

Step = NewType("Step", int)
"""Optimizer step, counted from 1. A peer at parameter version v works on step v + 1."""

Version = NewType("Version", int)
"""Parameter version: the number of optimizer steps applied. 0 is the initialisation."""

MicrobatchIndex = NewType("MicrobatchIndex", int)
"""Index of a microbatch inside its step, 0 ≤ index < microbatches per step."""

Generation = NewType("Generation", int)
"""Number of a coordinator start; fences off stale messages (design: coordinator)."""
