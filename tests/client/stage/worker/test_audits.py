"""Audits at a stage worker: what is shown of a kept microbatch, and what an auditor finds."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kits.client.stage_runners import (
    CPU,
    PLENTY,
    STEP,
    make_manifest,
    runners_of,
    through,
    with_codecs,
)
from swarm_client.stage.protocol import gradient_blocks, messages
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.protocol.gradient_blocks import BlockDigests, gradient_digest
from swarm_client.stage.protocol.messages import DigestSums, SumsDigested
from swarm_client.stage.worker.accumulation.accumulator import KeptMicrobatch
from swarm_client.stage.worker.accumulation.audited_gradient import AuditedGradient, CellSums
from swarm_client.stage.worker.audits import AuditRunner, Recomputed, ShownTensors
from swarm_client.stage.worker.parameter_versions import ParameterSet
from swarm_client.stage.worker.stage_runner import ComputedAgain, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_coordinator.configuration.run_settings import TOLERANCES
from swarm_shared.base.transcript import KeptTensors, Transcript
from swarm_shared.base.types import (
    CHECKS_PER_SECRET,
    Generation,
    MicrobatchIndex,
    RunId,
    StageIndex,
)
from swarm_shared.codecs.tensors import round_trip
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.linear_digest import (
    DigestKey,
    check_seed,
    digest_sum,
    from_text,
    to_text,
)
from swarm_shared.identity.norm_sketch import Sketcher, sketch_digest, sketch_sum
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.model import FlatLayout
from swarm_shared.run.codec_sizes import (
    ACTIVATION_CODECS,
    ActivationCodec,
    AverageCodec,
    GradientCodec,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import ComputeDtype
from swarm_shared.trust.votes import Claim, Finding, finding

MICROBATCH = MicrobatchIndex(5)
SEED = "5eed" * 8
WEIGHTS = "0f" * 16
ALL = (0,)
"""The blocks of a small gradient."""
BLOCK_ELEMENTS = gradient_blocks.BLOCK_BYTES // 4
NONE = torch.zeros(0)
ROUNDING = 5e-5
"""Relative difference of two machines that round otherwise; within the tolerance of audits."""


def shown_in(path: Path, claimed: Transcript, blocks: tuple[int, ...] = ALL) -> messages.ShownFile:
    return messages.ShownFile(path=str(path), blocks=blocks, claimed=claimed)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_auditor_that_computes_alike_finds_the_receipts_transcript(
    tmp_path: Path, codec: str
) -> None:
    manifest = with_codecs(make_manifest(3), codec, codec)
    audited, auditors = runners_of(manifest), runners_of(manifest)
    receipts = through(audited, MICROBATCH).transcripts()
    for peer, auditor, receipt in zip(audited, auditors, receipts, strict=True):
        inputs, computed = tmp_path / "inputs", tmp_path / "computed"
        AuditRunner(peer).save_kept(STEP, MICROBATCH, inputs, KeptTensors.INPUTS)
        AuditRunner(peer).save_kept(STEP, MICROBATCH, computed, KeptTensors.COMPUTED, ALL)
        found = AuditRunner(auditor).audit(STEP, inputs, shown_in(computed, receipt))
        assert found.transcript == receipt
        assert found.distance == 0.0
        assert (found.loss_sum is not None) == (peer is audited[-1])


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_neighbours_give_to_the_bit_what_a_peer_has_received(tmp_path: Path, codec: str) -> None:
    manifest = with_codecs(make_manifest(3), codec, codec)
    runners = runners_of(manifest)
    through(runners, MICROBATCH)
    sent, received = tmp_path / "sent", tmp_path / "received"
    for before, own in itertools.pairwise(runners):
        AuditRunner(own).save_kept(STEP, MICROBATCH, received, KeptTensors.INPUTS)
        AuditRunner(before).save_kept(STEP, MICROBATCH, sent, KeptTensors.OUTPUT)
        assert sent.read_bytes() == received.read_bytes()[: own.sizes.input_bytes]
        AuditRunner(before).save_kept(STEP, MICROBATCH, received, KeptTensors.INPUTS)
        AuditRunner(own).save_kept(STEP, MICROBATCH, sent, KeptTensors.INPUT_GRADIENT)
        assert sent.read_bytes() == received.read_bytes()[before.sizes.request_bytes :]


def test_an_end_stage_has_no_output_or_input_gradient_to_give(tmp_path: Path) -> None:
    runners = runners_of(make_manifest(3))
    through(runners, MICROBATCH)
    for runner, tensors in (
        (runners[0], KeptTensors.INPUT_GRADIENT),
        (runners[-1], KeptTensors.OUTPUT),
    ):
        with pytest.raises(RequestFailed, match=f"sends no {tensors}") as failed:
            AuditRunner(runner).save_kept(STEP, MICROBATCH, tmp_path / "sent", tensors)
        assert failed.value.code == "bad_input"


@pytest.mark.parametrize("tensors", [KeptTensors.OUTPUT, KeptTensors.INPUT_GRADIENT])
def test_a_neighbour_that_does_not_get_again_what_it_sent_gives_nothing(
    tmp_path: Path, tensors: KeptTensors
) -> None:
    runner = (runners := runners_of(make_manifest(3)))[1]
    through(runners, MICROBATCH)
    honest = runner.accumulator.transcripts[MICROBATCH]
    other = honest.model_copy(update={tensors.value: "f" * 32})
    runner.accumulator.transcripts[MICROBATCH] = other
    with pytest.raises(RequestFailed, match="when it is computed again"):
        AuditRunner(runner).save_kept(STEP, MICROBATCH, tmp_path / "sent", tensors)


def test_an_audit_changes_neither_accumulator_nor_parameters_nor_transcripts(
    tmp_path: Path,
) -> None:
    manifest = make_manifest(3)
    with_audits, without = runners_of(manifest), runners_of(manifest)
    for microbatch in (MICROBATCH, 6):
        through(without, microbatch)
    for microbatch in (MICROBATCH, 6):
        through(with_audits, microbatch)
        for runner in with_audits:
            audits = AuditRunner(runner)
            audits.save_kept(STEP, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
            audits.save_kept(STEP, MICROBATCH, tmp_path / "computed", KeptTensors.COMPUTED, ALL)
            if runner is not with_audits[-1]:
                audits.save_kept(STEP, MICROBATCH, tmp_path / "sent", KeptTensors.OUTPUT)
            if runner is not with_audits[0]:
                audits.save_kept(STEP, MICROBATCH, tmp_path / "sent", KeptTensors.INPUT_GRADIENT)
            audits.audit(STEP, tmp_path / "inputs")
    for one, other in zip(with_audits, without, strict=True):
        assert torch.equal(one.accumulator.totals(), other.accumulator.totals())
        assert one.accumulator.transcripts == other.accumulator.transcripts
        own, others = one.stage.all_parameters(), other.stage.all_parameters()
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own, others, strict=True))


def test_what_differs_is_found_and_measured_if_it_has_the_claimed_digests(tmp_path: Path) -> None:
    manifest = make_manifest(3)
    audited, auditors = runners_of(manifest), runners_of(manifest)
    receipt = through(audited, MICROBATCH).transcripts()[1]
    inputs, computed = tmp_path / "inputs", tmp_path / "computed"
    AuditRunner(audited[1]).save_kept(STEP, MICROBATCH, inputs, KeptTensors.INPUTS)
    AuditRunner(audited[1]).save_kept(STEP, MICROBATCH, computed, KeptTensors.COMPUTED, ALL)
    content, zeros = computed.read_bytes(), bytes(4 * audited[1].layout.own_count)
    digests = joined_digests(zeros)
    computed.write_bytes(digests + zeros + content[len(digests + zeros) :])
    unlike = AuditRunner(auditors[1]).audit(STEP, inputs, shown_in(computed, receipt))
    assert unlike.distance is None  # these are not the tensors of the receipt
    claimed = receipt.model_copy(update={"gradient": gradient_digest(digests)})
    found = AuditRunner(auditors[1]).audit(STEP, inputs, shown_in(computed, claimed))
    assert found.distance == pytest.approx(1.0)
    assert found.transcript == receipt != claimed


def test_a_peer_whose_second_computation_gives_something_else_shows_it_to_nobody(
    tmp_path: Path,
) -> None:
    """Its first one had a fault: what it counted is not what the microbatch gives."""
    runners = runners_of(make_manifest(3))
    through(runners, MICROBATCH).transcripts()
    for runner in runners:
        honest = runner.accumulator.transcripts[MICROBATCH]
        runner.accumulator.transcripts[MICROBATCH] = honest.model_copy(
            update={"gradient": "f" * 32}
        )
        audits = AuditRunner(runner)
        audits.save_kept(STEP, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
        with pytest.raises(RequestFailed, match="when it is computed again") as failed:
            audits.save_kept(STEP, MICROBATCH, tmp_path / "computed", KeptTensors.COMPUTED, ALL)
        assert failed.value.code == "not_repeatable"
    assert not (tmp_path / "computed").exists()


def joined_digests(gradient: bytes) -> bytes:
    digests = BlockDigests()
    digests.update(memoryview(gradient))
    return digests.joined()


class UnlikeRunner(StageRunner):
    """A machine that rounds otherwise: what it computes is off by `ROUNDING` of each value."""

    def compute_again(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> ComputedAgain:
        done = super().compute_again(parameter_set, kept)
        draw = torch.Generator().manual_seed(0)

        def rounded(tensor: Tensor) -> Tensor:
            return tensor * (1.0 + ROUNDING * torch.randn(tensor.shape, generator=draw))

        gradient = done.input_gradient
        return ComputedAgain(
            done.output if self.stage.is_last else rounded(done.output),
            None if gradient is None else rounded(gradient),
            [rounded(gradient) for gradient in done.gradients],
        )


@pytest.mark.parametrize(
    ("activation", "gradient"),
    [("none", "none"), *zip(ACTIVATION_CODECS[1:], ACTIVATION_CODECS[1:], strict=True),
     ("int8", "topk")],
)  # fmt: skip
def test_no_codec_makes_the_distance_of_unlike_machines_larger_than_their_rounding(
    tmp_path: Path, activation: ActivationCodec, gradient: GradientCodec
) -> None:
    """A value at the edge of a codec's step is sent a whole step away from another machine's."""
    manifest = with_codecs(make_manifest(2), activation, gradient)
    inputs, computed = tmp_path / "inputs", tmp_path / "computed"
    sent_apart = 0.0
    for microbatch in range(6):
        honest = runners_of(manifest)
        through(honest, microbatch)
        for index, auditor in enumerate(honest):
            audited = UnlikeRunner(manifest, StageIndex(index), CPU, PLENTY, PLENTY)
            kept = auditor.accumulator.contents.kept(MicrobatchIndex(microbatch))
            assert kept is not None
            audited.accumulator.contents.add(MicrobatchIndex(microbatch), kept)
            shows = AuditRunner(audited)
            shows.save_kept(STEP, MicrobatchIndex(microbatch), inputs, KeptTensors.INPUTS)
            shows.save_kept(STEP, MicrobatchIndex(microbatch), computed, KeptTensors.COMPUTED, ALL)
            receipt = shows.audit(STEP, inputs).transcript
            found = AuditRunner(auditor).audit(STEP, inputs, shown_in(computed, receipt))
            assert found.transcript != receipt
            assert found.distance == pytest.approx(ROUNDING, rel=0.3)
            sent_apart = max(sent_apart, _sent_apart(audited, auditor, kept))
    assert sent_apart > (0.0 if activation == "none" else 2 * ROUNDING)


def _sent_apart(one: StageRunner, other: StageRunner, kept: KeptMicrobatch) -> float:
    """The relative distance between what two machines send of the same microbatch."""
    codecs = one.manifest.codecs
    mine, theirs = (
        runner.compute_again(runner.open_parameter_set(STEP), kept) for runner in (one, other)
    )
    codec, a, b = (
        (codecs.gradient, mine.input_gradient, theirs.input_gradient)
        if one.stage.is_last
        else (codecs.activation, mine.output, theirs.output)
    )
    assert a is not None
    assert b is not None
    a, b = round_trip(codec, a), round_trip(codec, b)
    return float((a - b).norm() / b.norm())


class RoundsWithin(StageRunner):
    """A machine that rounds otherwise within the stage: some of its weights fall to the other side
    when they are rounded to bfloat16."""

    def compute_again(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> ComputedAgain:
        draw = torch.Generator().manual_seed(0)
        own = [parameter.detach().clone() for parameter in parameter_set.parameters]
        with torch.no_grad():
            for parameter in parameter_set.parameters:
                parameter.mul_(1.0 + 1e-6 * torch.randn(parameter.shape, generator=draw))
        done = super().compute_again(parameter_set, kept)
        with torch.no_grad():
            torch._foreach_copy_(parameter_set.parameters, own)
        return done


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("dtype", "least"), [("float32", 1e-8), ("bfloat16", 1e-4)])
def test_unlike_machines_agree_within_the_tolerance_of_their_dtype(
    tmp_path: Path, dtype: ComputeDtype, least: float, codec: str
) -> None:
    """In bfloat16 they are further apart than float32's tolerance."""
    manifest = with_codecs(make_manifest(2, dtype), codec, codec)
    inputs, computed = tmp_path / "inputs", tmp_path / "computed"
    honest = runners_of(manifest)
    for audited, receipt in zip(honest, through(honest, MICROBATCH).transcripts(), strict=True):
        auditor = RoundsWithin(manifest, audited.stage_index, CPU, PLENTY, PLENTY)
        shows = AuditRunner(audited)
        shows.save_kept(STEP, MICROBATCH, inputs, KeptTensors.INPUTS)
        shows.save_kept(STEP, MICROBATCH, computed, KeptTensors.COMPUTED, ALL)
        distance = AuditRunner(auditor).audit(STEP, inputs, shown_in(computed, receipt)).distance
        assert distance is not None
        assert least < distance <= TOLERANCES[dtype]


# ---- samples of a large gradient


class LiesAt(StageRunner):
    """A machine with another gradient in one place."""

    place = 0

    def compute_again(self, parameter_set: ParameterSet, kept: KeptMicrobatch) -> ComputedAgain:
        done = super().compute_again(parameter_set, kept)
        flat = torch.cat([gradient.reshape(-1) for gradient in done.gradients])
        flat[self.place] += 100.0 * flat.norm()
        sizes = [gradient.numel() for gradient in done.gradients]
        parts = zip(flat.split(sizes), done.gradients, strict=True)
        gradients = [part.reshape(gradient.shape) for part, gradient in parts]
        return ComputedAgain(done.output, done.input_gradient, gradients)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_blocks, "BLOCK_BYTES", 256)


def a_liar(place: int, tmp_path: Path) -> tuple[AuditRunner, AuditRunner, Transcript]:
    """A liar and an honest peer of the middle stage, and the liar's receipt of a microbatch whose
    inputs are in a file."""
    manifest = make_manifest(3)
    runners = runners_of(manifest)
    through(runners, MICROBATCH)
    liar = LiesAt(manifest, StageIndex(1), CPU, PLENTY, PLENTY)
    liar.place = place
    kept = runners[1].accumulator.contents.kept(MICROBATCH)
    assert kept is not None
    liar.accumulator.contents.add(MICROBATCH, kept)
    shows = AuditRunner(liar)
    shows.save_kept(STEP, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
    return shows, AuditRunner(runners[1]), shows.audit(STEP, tmp_path / "inputs").transcript


@pytest.mark.parametrize("blocks", [(2,), (0, 2, 5)])
def test_a_lie_in_a_block_of_the_sample_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, ...]
) -> None:
    small_blocks(monkeypatch)
    liar, auditor, claimed = a_liar(2 * 64 + 9, tmp_path)
    liar.save_kept(STEP, MICROBATCH, tmp_path / "shown", KeptTensors.COMPUTED, blocks)
    found = auditor.audit(STEP, tmp_path / "inputs", shown_in(tmp_path / "shown", claimed, blocks))
    assert found.transcript != claimed
    assert found.distance is not None
    assert found.distance > 1.0


def recomputed(
    gradient: Tensor, *, blocks: tuple[int, ...] = ALL, output: Tensor = NONE,
    input_gradient: Tensor = NONE,
) -> Recomputed:  # fmt: skip
    """What a machine has computed that got these tensors."""
    read = AuditedGradient(gradient.numel(), blocks)
    read.add(gradient)
    shown = ShownTensors(read.block_digests, read.blocks_P, output, input_gradient)
    return Recomputed(shown, read.norm, gradient.numel())


@pytest.mark.parametrize("lie", range(3), ids=["output", "input gradient", "gradient"])
def test_each_of_the_tensors_is_measured(lie: int) -> None:
    ones = torch.ones(8)
    own = recomputed(ones, output=ones, input_gradient=ones)
    output, input_gradient, gradient = (1.5 * ones if place == lie else ones for place in range(3))
    claimed = recomputed(gradient, output=output, input_gradient=input_gradient)
    assert own.distance(claimed.shown) == pytest.approx(0.5)


def test_a_lie_beside_the_sample_is_none_to_unlike_machines_and_one_to_a_machine_that_is_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    liar, auditor, claimed = a_liar(2 * 64 + 9, tmp_path)
    liar.save_kept(STEP, MICROBATCH, tmp_path / "shown", KeptTensors.COMPUTED, (1, 3))
    found = auditor.audit(STEP, tmp_path / "inputs", shown_in(tmp_path / "shown", claimed, (1, 3)))
    assert found.distance == 0.0
    identities = [Identity.from_seed(letter * 32) for letter in (b"a", b"b")]
    statement = AuditStatement(
        run=RunId("run"), generation=Generation(1), audit=1, step=STEP, microbatch=MICROBATCH,
        stage=StageIndex(1), peer=identities[0].peer_id, auditor=identities[1].peer_id,
        transcript=found.transcript, distance=found.distance,
    )  # fmt: skip
    claim = Claim(claimed, None)
    assert finding(claim, statement, 1e-4, compared=True) is Finding.AGREES
    assert finding(claim, statement, 0.0, compared=True) is Finding.DIFFERS


def test_blocks_that_the_receipt_does_not_bind_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)
    liar, auditor, claimed = a_liar(2 * 64 + 9, tmp_path)
    lie, honest, shown = tmp_path / "lie", tmp_path / "honest", tmp_path / "shown"
    liar.save_kept(STEP, MICROBATCH, lie, KeptTensors.COMPUTED, (2,))
    auditor.save_kept(STEP, MICROBATCH, honest, KeptTensors.COMPUTED, (2,))
    digests = 16 * gradient_blocks.block_count(4 * auditor._elements)
    # The digests that were counted with another block, and a list of digests that was not counted.
    for first, rest in ((lie, honest), (honest, lie), (honest, honest)):
        shown.write_bytes(first.read_bytes()[:digests] + rest.read_bytes()[digests:])
        found = auditor.audit(STEP, tmp_path / "inputs", shown_in(shown, claimed, (2,)))
        assert found.distance is None
    found = auditor.audit(STEP, tmp_path / "inputs", shown_in(lie, claimed, (2,)))
    assert found.distance is not None


def test_blocks_of_small_gradients_are_measured_by_the_mean_of_all() -> None:
    """In such a block honest machines may differ by more than the tolerance of its own norm."""
    gradient = torch.ones(4 * BLOCK_ELEMENTS)
    gradient[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS] = 1e-6
    other = gradient.clone()
    other[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS] *= 1.5
    for blocks, expected in (((1,), 0.5e-6 / (3 / 4) ** 0.5), ((0, 1), 0.5e-6 / 1.5**0.5)):
        own, claimed = (recomputed(one, blocks=blocks) for one in (gradient, other))
        assert own.distance(claimed.shown) == pytest.approx(expected, rel=1e-3)
    own, far = (recomputed(one, blocks=(0,)) for one in (gradient, -gradient))
    assert own.distance(far.shown) == pytest.approx(2.0)


@given(
    sizes=st.lists(st.integers(0, 3 * BLOCK_ELEMENTS), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 12)),
)
def test_a_gradient_that_is_read_in_pieces_gives_what_the_whole_gives(
    sizes: list[int], chosen: set[int]
) -> None:
    whole = torch.arange(sum(sizes), dtype=torch.float32) + 1.0
    nbytes = whole.nbytes
    blocks = sorted(chosen & set(range(gradient_blocks.block_count(nbytes))))
    read = AuditedGradient(whole.numel(), blocks)
    for piece in whole.split(sizes):
        read.add(piece)
    content = whole.numpy().tobytes()
    assert read.block_digests == joined_digests(content)
    ranges = [gradient_blocks.block_range(block, nbytes) for block in blocks]
    expected = b"".join(content[place.start : place.stop] for place in ranges)
    assert read.blocks_P.numpy().tobytes() == expected
    assert read.norm == pytest.approx(float(whole.double().norm()))


@given(own=st.lists(st.integers(1, 40), min_size=1), tied=st.lists(st.integers(1, 40)))
def test_digests_and_sketches_of_pieces_are_those_of_the_parts(
    own: list[int], tied: list[int]
) -> None:
    layout = SimpleNamespace(own_count=sum(own), tied_count=sum(tied))
    sums = CellSums(cast(FlatLayout, layout), SEED)
    whole = np.arange(sum(own) + sum(tied), dtype=np.float32) + 1
    for piece in np.split(whole, np.cumsum(own + tied))[:-1]:
        sums.add(piece)
    parts = {"own": whole[: sum(own)], "tied": whole[sum(own) :]}
    seeds = [check_seed(SEED, check) for check in range(CHECKS_PER_SECRET)]
    assert sums.digests() == tuple(
        tuple(to_text(DigestKey(seed, name).digest(part)) for seed in seeds)
        for name, part in parts.items()
        if len(part)
    )
    assert sums.sketches() == tuple(
        tuple(norm_sketch.to_text(Sketcher(seed, name).sketch(part)) for seed in seeds)
        for name, part in parts.items()
        if len(part)
    )


@pytest.mark.parametrize("blocks", [(1,), (0, 0), (0, 7), (-1,)])
def test_only_blocks_of_the_gradient_in_ascending_order_are_shown(
    tmp_path: Path, blocks: tuple[int, ...]
) -> None:
    runners = runners_of(make_manifest(3))
    through(runners, MICROBATCH)
    with pytest.raises(RequestFailed, match="none of 1 in ascending order") as failed:
        AuditRunner(runners[0]).save_kept(
            STEP, MICROBATCH, tmp_path / "computed", KeptTensors.COMPUTED, blocks
        )
    assert failed.value.code == "bad_input"


@pytest.mark.parametrize("content", [b"", b"short", np.float32("nan").tobytes()])
def test_a_file_that_is_not_of_the_receipt_gives_no_distance(
    tmp_path: Path, content: bytes
) -> None:
    runners = runners_of(with_codecs(make_manifest(3), "int8", "int8"))
    receipt = through(runners, MICROBATCH).transcripts()[1]
    inputs, computed = tmp_path / "inputs", tmp_path / "computed"
    audits = AuditRunner(runners[1])
    audits.save_kept(STEP, MICROBATCH, inputs, KeptTensors.INPUTS)
    audits.save_kept(STEP, MICROBATCH, computed, KeptTensors.COMPUTED, ALL)
    assert audits.audit(STEP, inputs, shown_in(computed, receipt)).distance == 0.0
    right = computed.read_bytes()
    computed.write_bytes(content if len(content) != 4 else right[:-4] + content)
    assert audits.audit(STEP, inputs, shown_in(computed, receipt)).distance is None


def averaging(manifest: Manifest, codec: AverageCodec) -> Manifest:
    codecs = manifest.codecs.model_copy(update={"average": codec})
    return manifest.model_copy(update={"codecs": codecs})


def digests_of(
    runner: StageRunner, stops: dict[Literal["own", "tied"], tuple[int, ...]], seed: str,
    weights: str | None = None,
) -> list[SumsDigested]:  # fmt: skip
    """The digests of what is in the accumulator, as a member states its parts; the result is 0."""
    totals = runner.accumulator.totals()
    found = []
    for part, ends in stops.items():
        request = DigestSums(
            step=STEP, part=part, seed=seed, stops=ends, weights=weights, sketches=weights is None
        )
        digested = StepRunner(runner).digest_sums(request, totals, torch.zeros_like(totals))
        assert set(digested.results) == {"0" * 16}
        found.append(digested)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("slices", [1, 3])
def test_what_auditors_find_adds_up_to_what_a_member_puts_in(
    tmp_path: Path, tied: bool, slices: int
) -> None:
    manifest = averaging(make_manifest(3, tied=tied), "exact")
    audited, auditors = runners_of(manifest), runners_of(manifest)
    for number in (5, 6, 7):
        through(audited, number)
    for peer, auditor in zip(audited, auditors, strict=True):
        sizes: dict[Literal["own", "tied"], int] = {
            "own": peer.layout.own_count, "tied": peer.layout.tied_count
        }  # fmt: skip
        stops: dict[Literal["own", "tied"], tuple[int, ...]] = {
            part: tuple(size * (n + 1) // slices for n in range(slices))
            for part, size in sizes.items() if size
        }  # fmt: skip
        assert (len(stops) == 2) == (tied and peer is not audited[1])
        found = []
        for number in (5, 6, 7):
            inputs = tmp_path / "inputs"
            AuditRunner(peer).save_kept(STEP, MicrobatchIndex(number), inputs, KeptTensors.INPUTS)
            found.append(AuditRunner(auditor).audit(STEP, inputs, None, SEED))
        for check in range(CHECKS_PER_SECRET):
            for index, stated in enumerate(digests_of(peer, stops, check_seed(SEED, check))):
                of_cells = digest_sum(from_text(done.sums[index][check]) for done in found)
                assert of_cells == digest_sum(map(from_text, stated.parts))
                sketch = sketch_sum(
                    norm_sketch.from_text(done.sketches[index][check]) for done in found
                )
                assert norm_sketch.to_text(sketch) == stated.part_sketch


@pytest.mark.parametrize("slices", [1, 3])
def test_digests_of_sketches_add_up_to_that_of_the_sketch_that_was_stated(slices: int) -> None:
    runners = runners_of(averaging(make_manifest(3), "exact"))
    through(runners, MICROBATCH)
    runner = runners[0]
    count = runner.layout.own_count
    (stated,) = digests_of(runner, {"own": (count,)}, SEED)
    assert stated.part_sketch is not None
    expected = sketch_digest(norm_sketch.from_text(stated.part_sketch), WEIGHTS)
    ends = tuple(count * (n + 1) // slices for n in range(slices))
    (weighed,) = digests_of(runner, {"own": ends}, SEED, WEIGHTS)
    assert digest_sum(map(from_text, weighed.parts)) == expected != 0
    assert weighed.part_sketch is None


def test_sums_are_digested_only_where_they_are_exact_and_in_whole_slices(tmp_path: Path) -> None:
    runners = runners_of(averaging(make_manifest(3), "float16"))
    through(runners, MICROBATCH)
    AuditRunner(runners[0]).save_kept(STEP, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
    done = AuditRunner(runners[0]).audit(STEP, tmp_path / "inputs", None, SEED)
    assert done.sums == done.sketches == ()
    count = runners[0].layout.own_count
    with pytest.raises(RequestFailed, match="rounded"):
        digests_of(runners[0], {"own": (count,)}, SEED)
    exact = runners_of(averaging(make_manifest(3), "exact"))[0]
    for stops in ((), (count - 1,), (count, 1, count), (count + 1,)):
        with pytest.raises(RequestFailed, match="no partition"):
            digests_of(exact, {"own": stops}, SEED)


def test_only_a_microbatch_of_an_open_step_whose_inputs_are_kept_is_shown(tmp_path: Path) -> None:
    runners = runners_of(make_manifest(3))
    through(runners, MICROBATCH)
    audits = AuditRunner(runners[0])
    with pytest.raises(RequestFailed, match="is not kept"):
        audits.save_kept(STEP, MicrobatchIndex(9), tmp_path / "inputs", KeptTensors.INPUTS)
    with pytest.raises(RequestFailed, match="works on step"):
        audits.save_kept(STEP + 3, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
    runners[0].reset_step(STEP)
    with pytest.raises(RequestFailed, match="is not kept"):
        audits.save_kept(STEP, MICROBATCH, tmp_path / "inputs", KeptTensors.INPUTS)
