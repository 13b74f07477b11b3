"""Transcripts: digests of what crosses a stage's boundaries, and of what is counted."""

from __future__ import annotations

import pytest
from blake3 import blake3

from kits.client.stage_runners import (
    STEP,
    make_manifest,
    runners_of,
    through,
    tokens_of,
    wire,
    with_codecs,
)
from swarm_shared.base.transcript import GRADIENT_BLOCK_BYTES
from swarm_shared.base.types import MicrobatchIndex
from swarm_shared.identity.work_statements import DIGEST_BYTES, wire_digest
from swarm_shared.run.codec_sizes import ACTIVATION_CODECS, GRADIENT_CODECS

MICROBATCH = MicrobatchIndex(5)


@pytest.mark.parametrize("activation", ACTIVATION_CODECS)
@pytest.mark.parametrize("gradient", GRADIENT_CODECS)
def test_transcripts_of_a_microbatch_are_a_chain_from_token_ids_to_targets(
    activation: str, gradient: str
) -> None:
    manifest = with_codecs(make_manifest(3), activation, gradient)
    passed = through(runners_of(manifest), MICROBATCH)
    inputs, targets = tokens_of(manifest, MICROBATCH)
    first, middle, last = passed.transcripts()
    assert first.input == wire_digest(wire(inputs).tobytes())
    assert first.output == middle.input == wire_digest(passed.activations[0])
    assert middle.output == last.input == wire_digest(passed.activations[1])
    assert last.output == wire_digest(wire(targets).tobytes())
    assert last.output_gradient == ""
    assert last.input_gradient == middle.output_gradient == wire_digest(passed.gradients[1])
    assert middle.input_gradient == first.output_gradient == wire_digest(passed.gradients[0])
    assert first.input_gradient == ""


@pytest.mark.parametrize("average", ["exact", "none"])
def test_equal_inputs_give_equal_transcripts_and_the_digest_is_of_what_is_added(
    average: str,
) -> None:
    manifest = make_manifest(3)
    codecs = manifest.codecs.model_copy(update={"average": average})
    manifest = manifest.model_copy(update={"codecs": codecs})
    runners, others = runners_of(manifest), runners_of(manifest)
    transcripts = through(runners, MICROBATCH).transcripts()
    assert transcripts == through(others, MICROBATCH).transcripts()
    for runner, transcript in zip(runners, transcripts, strict=True):
        added = runner.accumulator.totals().float().numpy().tobytes()
        assert len(added) < GRADIENT_BLOCK_BYTES
        assert wire_digest(blake3(added).digest(length=DIGEST_BYTES)) == transcript.gradient
    assert through(others, 6).transcripts() != transcripts


def test_a_repeated_computation_answers_the_transcript_of_what_is_in_the_accumulator() -> None:
    runners = runners_of(make_manifest(3))
    before = through(runners, MICROBATCH)
    again = through(runners, MICROBATCH, tokens_as=7)
    assert again.activations != before.activations
    assert again.transcripts() == before.transcripts()
    assert not any(again.added)


def test_a_microbatch_that_is_not_accumulated_has_no_transcript() -> None:
    passed = through(runners_of(make_manifest(3)), MICROBATCH, accumulate=False)
    assert passed.answered == [None, None, None]


def test_a_removed_microbatch_has_no_transcript_and_gets_a_new_one() -> None:
    runners = runners_of(make_manifest(3))
    first = through(runners, MICROBATCH).transcripts()
    through(runners, 6)
    for runner in runners:
        assert runner.uncommit(STEP, (MICROBATCH,))
        assert runner.accumulator.transcripts.get(MICROBATCH) is None
        assert runner.accumulator.transcripts[MicrobatchIndex(6)]
    assert through(runners, MICROBATCH).transcripts() == first
    runners[0].reset_step(STEP)
    assert runners[0].accumulator.transcripts.get(MICROBATCH) is None
