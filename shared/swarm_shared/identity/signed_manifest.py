"""The signed manifest, and the run's id that follows from it.

Owns the envelope's domain and bound, and which part of a manifest names the run. The content of a
manifest is in `swarm_shared.run.manifest`; the envelope's format in
`swarm_shared.identity.signing`.
"""

from __future__ import annotations

import hashlib

from swarm_shared.base.types import PeerId, RunId
from swarm_shared.identity.canonical_json import canonical_json
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import open_message, sign_message
from swarm_shared.run.manifest import Manifest

MANIFEST_DOMAIN = "swarmtrain-manifest-1"

MAX_MANIFEST_BYTES = 3 * 1024 * 1024
"""Longest signed manifest: room for more than ten thousand shards; in base64 it fills the field
that carries it."""


def sign_manifest(identity: Identity, manifest: Manifest) -> bytes:
    assert identity.peer_id == manifest.organiser, "only the organiser signs a manifest"
    return sign_message(identity, manifest, MANIFEST_DOMAIN)


def open_manifest(envelope: bytes, organiser: PeerId) -> Manifest:
    """Return the checked manifest. FrameError or SignatureError if it is not one by `organiser`."""
    manifest, _ = open_message(
        envelope, Manifest, MANIFEST_DOMAIN, organiser, max_bytes=MAX_MANIFEST_BYTES
    )
    return manifest


def run_id_of(manifest: Manifest) -> RunId:
    """Derive the run's id from what makes it another run if changed: organiser, name, model, data,
    seed and initial parameters, hashed in canonical JSON (RFC 8785).

    Length, limits and addresses are left out, so that invites outlive a change of those.
    """
    named: dict[str, object] = {
        "organiser": manifest.organiser,
        "name": manifest.name,
        "model": manifest.model.model_dump(),
        "data": manifest.data.model_dump(exclude={"mirrors"}),
        "seed": manifest.training.seed,
    }
    if manifest.initial:
        named["initial"] = [state.sha256 for state in manifest.initial]
    return RunId(hashlib.sha256(b"swarmtrain-run-1" + canonical_json(named)).hexdigest())
