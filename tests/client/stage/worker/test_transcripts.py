"""Transcripts: digests of what crosses a stage's boundaries, and of what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from client.stage.worker.test_payloads import with_codecs
from client.stage.worker.test_stage_runner import STEP, make_manifest, runners_of, tokens_of, wire
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex
from swarm_shared.identity.work_statements import wire_digest
from swarm_shared.run.codec_sizes import ACTIVATION_CODECS, GRADIENT_CODECS

MICROBATCH = MicrobatchIndex(5)


@dataclass(frozen=True)
class Passed:
    """One microbatch through all stages: their transcripts, and what crossed the boundaries."""

    answered: list[Transcript | None]
    added: list[bool]
    activations: list[bytes]
    gradients: list[bytes]

    def transcripts(self) -> list[Transcript]:
        assert all(self.answered)
        return [one for one in self.answered if one is not None]


def through(
    runners: Sequence[StageRunner], number: int, microbatch: int = MICROBATCH,
    accumulate: bool = True, tokens_as: int | None = None,
) -> Passed:  # fmt: skip
    """Each answer lies in the slot of its request, as in the worker's loop.

    `tokens_as`: number of the microbatch whose token ids are sent instead.
    """
    inputs, targets = tokens_of(runners[0].manifest, microbatch if tokens_as is None else tokens_as)
    index = MicrobatchIndex(microbatch)
    activations: list[bytes] = []
    gradients: list[bytes] = []
    payload = wire(inputs).tobytes()
    for runner in runners[:-1]:
        slot = in_slot(runner, payload)
        forward = runner.forward(number, STEP, index, accumulate, slot[: len(payload)])
        assert isinstance(forward, ForwardResult)
        sent = slot[: runner.codec.write_output(forward.output, slot)]
        runner.output_sent(number, sent)
        payload = sent.tobytes()
        activations.append(payload)
    payload += wire(targets).tobytes()
    slot = in_slot(runners[-1], payload)
    last = runners[-1].forward(number, STEP, index, accumulate, slot[: len(payload)])
    assert isinstance(last, BackwardResult)
    result, added, transcripts = last, [last.added], []
    for runner, below in zip(reversed(runners[1:]), reversed(runners[:-1]), strict=True):
        assert result.input_gradient is not None
        sent = slot[: runner.codec.write_input_gradient(result.input_gradient, slot)]
        transcripts.insert(0, runner.transcribe(number, result, sent))
        gradients.insert(0, sent.tobytes())
        slot = in_slot(below, gradients[0])
        result = below.backward(number, slot[: len(gradients[0])])
        added.insert(0, result.added)
    transcripts.insert(0, runners[0].transcribe(number, result, None))
    return Passed(transcripts, added, activations, gradients)


def in_slot(runner: StageRunner, payload: bytes) -> memoryview:
    slot = memoryview(bytearray(runner.sizes.slot_bytes))
    slot[: len(payload)] = payload
    return slot


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("activation", ACTIVATION_CODECS)
@pytest.mark.parametrize("gradient", GRADIENT_CODECS)
def test_transcripts_of_a_microbatch_are_a_chain_from_token_ids_to_targets(
    activation: str, gradient: str
) -> None:
    manifest = with_codecs(make_manifest(3), activation, gradient)
    passed = through(runners_of(manifest), 1)
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
    transcripts = through(runners, 1).transcripts()
    assert transcripts == through(others, 1).transcripts()
    for runner, transcript in zip(runners, transcripts, strict=True):
        added = runner.accumulator.totals().float().numpy().tobytes()
        assert wire_digest(added) == transcript.gradient
    assert through(others, 2, microbatch=6).transcripts() != transcripts


def test_a_repeated_computation_answers_the_transcript_of_what_is_in_the_accumulator() -> None:
    runners = runners_of(make_manifest(3))
    before = through(runners, 1)
    again = through(runners, 2, tokens_as=7)
    assert again.activations != before.activations
    assert again.transcripts() == before.transcripts()
    assert not any(again.added)


def test_a_microbatch_that_is_not_accumulated_has_no_transcript() -> None:
    passed = through(runners_of(make_manifest(3)), 1, accumulate=False)
    assert passed.answered == [None, None, None]


def test_a_removed_microbatch_has_no_transcript_and_gets_a_new_one() -> None:
    runners = runners_of(make_manifest(3))
    first = through(runners, 1).transcripts()
    through(runners, 2, microbatch=6)
    for runner in runners:
        assert runner.uncommit(STEP, (MICROBATCH,))
        assert runner.accumulator.transcripts.get(MICROBATCH) is None
        assert runner.accumulator.transcripts[MicrobatchIndex(6)]
    assert through(runners, 3).transcripts() == first
    runners[0].reset_step(STEP)
    assert runners[0].accumulator.transcripts.get(MICROBATCH) is None
