"""The digests that the coordinator expects are those of what an honest trainer sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarm_coordinator.admission.tickets import TicketOffice
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_shared.base.types import Generation, MicrobatchIndex, StageIndex, Step
from swarm_shared.data.leaf_files import LeafFiles
from swarm_shared.data.sample_ranges import SampleRanges
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import LeaseTicket, wire_digest
from swarm_shared.protocol import Lease, LeasedMicrobatch


def sent(array_BT: np.ndarray) -> str:
    return wire_digest(np.ascontiguousarray(array_BT, dtype="<u4").tobytes())


def test_tickets_and_expectations_are_of_what_a_trainer_sends(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij " * 3000)
    manifest = initialise_run(
        tmp_path / "run", "tiny", str(text), 2,
        {"model.sequence_length": 16, "training.microbatches_per_step": 4},
    )  # fmt: skip
    folder = RunFolder(tmp_path / "run")
    tokens, ranges = RunTokens(manifest, folder.data), SampleRanges(manifest)
    files = LeafFiles(folder.data, manifest.data)
    office = TicketOffice(
        Identity.load(folder.organiser_key), run_id_of(manifest), Generation(1), tokens
    )
    first_heldout = manifest.training.heldout_microbatches.start
    indices = tuple(MicrobatchIndex(m) for m in (0, 2, first_heldout, first_heldout + 1))
    leased = tuple(LeasedMicrobatch(microbatch=m, accumulate=(StageIndex(0),)) for m in indices)
    for step in (Step(5), Step(1)):
        lease = Lease(step=step, lease=1, window=1, microbatches=leased)
        for one in office.with_tickets(lease).microbatches:
            found = (
                ranges.heldout(one.microbatch - first_heldout)
                if one.microbatch >= first_heldout
                else ranges.training(step, one.microbatch)
            )
            contents = {leaf: files.content(leaf) for part in found for leaf in part.leaves}
            inputs, targets = ranges.arrays([part.cut(contents) for part in found])
            ticket = LeaseTicket.open(decode_envelope(one.ticket, "a ticket"), manifest.organiser)
            assert (ticket.tokens, ticket.targets) == (sent(inputs), sent(targets))
            assert (ticket.step, ticket.microbatch) == (step, one.microbatch)
            assert one.accumulate == (StageIndex(0),)
    drawn = tokens.drawn(Step(5), MicrobatchIndex(0))
    assert drawn != tokens.drawn(Step(6), MicrobatchIndex(0))
    heldout = MicrobatchIndex(first_heldout)
    assert drawn != tokens.drawn(Step(5), heldout) == tokens.drawn(Step(6), heldout)
