"""The sequences that make up a microbatch: a pure function of the manifest and the index.

Owns the order of the training data. Any trainer, and the reference, draw the same slots from the
same (seed, step, microbatch index), with nothing shared but the manifest. A slot is
`sequence_length` inputs and the token after them; neighbouring slots share that one token (the last
target of one is the first input of the next). No slot crosses a shard. Where slots lie in the files
is in `swarm_shared.data.sample_ranges`.

Every epoch visits every slot once, in an order of its own, without holding a permutation in memory:
a keyed Feistel network (Luby & Rackoff 1988) over the next even power of two, walked along its
cycle until it lands inside the range (Black & Rogaway 2002). It need not resist an attacker; it
only has to be a permutation and look unordered.

Shape suffixes: B sequences of a microbatch, R rounds.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from swarm_shared.base.errors import DataError, ProtocolError
from swarm_shared.data.shards import Split, slots_in
from swarm_shared.run.manifest import DataConfig, Manifest

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]

_ROUNDS = 6


def heldout_slots(manifest: Manifest, index: int) -> Int64:
    """Return the slots of the held-out split that make up one microbatch, in order; after the last
    one they start again."""
    if index < 0:
        raise ProtocolError(f"there is no held-out microbatch {index}; they count from 0")
    count = split_slots(manifest.data, "heldout", manifest.model.sequence_length)
    size = manifest.training.sequences_per_microbatch
    return (index * size + np.arange(size, dtype=np.int64)) % count


def training_slots(manifest: Manifest, step: int, index: int) -> Int64:
    """Return the slots of the training split that make up one microbatch."""
    training = manifest.training
    if step < 1 or not 0 <= index < training.microbatches_per_step:
        raise ProtocolError(
            f"there is no microbatch {index} of step {step}: steps count from 1, and each has "
            f"{training.microbatches_per_step} microbatches counted from 0"
        )
    count = split_slots(manifest.data, "train", manifest.model.sequence_length)
    size = training.sequences_per_microbatch
    # Plain numbers: an organiser's largest ones do not fit into 64 bits.
    first = ((step - 1) * training.microbatches_per_step + index) * size
    epoch, position = divmod(first, count)
    epochs_B, positions_B = np.divmod(position + np.arange(size, dtype=np.int64), count)
    keys = [_round_keys(training.seed, epoch + more) for more in range(int(epochs_B[-1]) + 1)]
    return _permuted(positions_B, count, np.stack(keys, axis=1)[:, epochs_B])


def split_slots(data: DataConfig, split: Split, sequence_length: int) -> int:
    """Return the number of sequences in a split, from its description alone."""
    count = sum(slots_in(shard.tokens, sequence_length) for shard in data.split(split))
    if count == 0:
        raise DataError(
            f"the {split} data holds no sequence of {sequence_length} tokens and the one after "
            "them; add text, or lower [model] sequence_length"
        )
    return count


def permuted(positions: Int64, count: int, seed: int, epoch: int) -> Int64:
    """Map positions by a permutation of 0 … count - 1 that (seed, epoch) chooses."""
    keys = _round_keys(seed, epoch)[:, None]
    return _permuted(positions, count, np.broadcast_to(keys, (_ROUNDS, positions.size)))


def _permuted(positions_B: Int64, count: int, keys_RB: Uint64) -> Int64:
    """Map each position by the permutation of its keys."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(positions_B.astype(np.uint64), keys_RB, half_bits)
    # Fewer than 3 of 4 values lie outside on average, and each walk stays on its own cycle.
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], keys_RB[:, outside], half_bits)
    return values.astype(np.int64)


def _feistel(values: Uint64, keys_RB: Uint64, half_bits: int) -> Uint64:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for keys_B in keys_RB:
        left, right = right, left ^ (mixed(right ^ keys_B) & mask)
    return (left << shift) | right


def mixed(values: Uint64) -> Uint64:
    """SplitMix64's finaliser (Steele et al. 2014): every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> Uint64:
    """Return the keys of an epoch's permutation; after 2^64 epochs they begin again."""
    message = (
        b"swarmtrain sample order 1"
        + seed.to_bytes(8, "little")
        + (epoch % 2**64).to_bytes(8, "little")
    )
    digest = hashlib.blake2b(message, digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
