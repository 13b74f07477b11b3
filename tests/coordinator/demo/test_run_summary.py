from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from swarm_coordinator.core.events import Restored
from swarm_coordinator.demo.churn import Kill
from swarm_coordinator.demo.reference_check import ComparedStep
from swarm_coordinator.demo.run_summary import (
    LINK_ROWS,
    SAMPLE_LINES,
    RunResult,
    Traffic,
    directed_traffic,
    heldout_verdict,
    protocol_label,
    result_document,
    summary_text,
)
from swarm_coordinator.status.document import LinkRow
from swarm_coordinator.storage.history import (
    History,
    HistoryStep,
    StageContribution,
)
from swarm_shared.base.types import PeerId, StageIndex, Step, Version
from swarm_shared.protocol import CONTROL_PROTOCOL, STAGE_PROTOCOL

COORDINATOR, ANNA, BERT = (
    PeerId("12D3KooWcoord0"),
    PeerId("12D3KooWanna00"),
    PeerId("12D3KooWbert00"),
)


def contribution(
    peer: PeerId, name: str | None, stage: int, microbatches: int
) -> StageContribution:
    return StageContribution(
        peer, name, StageIndex(stage), microbatches, microbatches * 1024, Step(1), Step(2)
    )


HISTORY = History(
    restored=Restored(1, Version(2), None, None, True, 2.25),
    steps=(
        HistoryStep(Step(1), 5.5, 16_384, 3.0, 0.0),
        HistoryStep(Step(2), 4.5, 16_384, 1.0, 3.0),
    ),
    contributions=(
        contribution(ANNA, "anna", 0, 24),
        contribution(BERT, None, 0, 8),
        contribution(BERT, None, 1, 32),
    ),
    links=(
        LinkRow(ANNA, BERT, STAGE_PROTOCOL, 5_000_000, 4_000_000),
        LinkRow(BERT, ANNA, STAGE_PROTOCOL, 4_100_000, 4_900_000),
        LinkRow(ANNA, COORDINATOR, CONTROL_PROTOCOL, 20_000, 30_000),
    ),
    names={ANNA: "anna", BERT: None},
    notes=(),
)
COMPARED = [ComparedStep(1, 5.5, 5.5), ComparedStep(2, 4.5, 4.5)]
RESULT = RunResult(HISTORY, COORDINATOR, unigram_entropy=3.3, sample="def f(x):\n\treturn x")


def test_each_direction_of_a_link_counts_once_with_the_larger_report() -> None:
    assert directed_traffic(HISTORY.links) == [
        Traffic(ANNA, BERT, STAGE_PROTOCOL, 5_000_000),
        Traffic(BERT, ANNA, STAGE_PROTOCOL, 4_100_000),
        Traffic(COORDINATOR, ANNA, CONTROL_PROTOCOL, 30_000),
        Traffic(ANNA, COORDINATOR, CONTROL_PROTOCOL, 20_000),
    ]


def test_the_summary_names_losses_peers_links_and_the_sample() -> None:
    lines = [" ".join(line.split()) for line in summary_text(RESULT).splitlines()]
    assert "steps 2 in 4.0 s" in lines
    assert "loss 5.500 at step 1, 4.500 at step 2" in lines
    assert "held-out loss 2.250, clearly below the text's unigram entropy, 3.300" in lines
    assert "throughput 8,192 tokens/s" in lines
    assert "…anna00 anna 0 24 24,576 75% 1-2" in lines
    assert "…bert00 1 32 32,768 100% 1-2" in lines
    assert "anna …bert00 activations, gradients 5.00" in lines
    assert "coordinator anna control 0.03" in lines
    assert "all 9.15" in lines
    assert "| return x" in lines


def test_many_links_are_summed_up_in_one_row() -> None:
    links = tuple(
        LinkRow(ANNA, PeerId(f"peer{number:04}"), STAGE_PROTOCOL, 1_000_000, 0)
        for number in range(LINK_ROWS + 10)
    )
    text = summary_text(replace(RESULT, history=replace(HISTORY, links=links)))
    assert "10 more" in text
    assert " ".join(text.split()).count("10.00") == 1


def test_the_loss_of_longer_tokens_is_also_told_per_byte() -> None:
    result = replace(RESULT, bytes_per_token=2.5)
    line = "held-out loss  2.250 (0.900 a byte), clearly below the text's unigram entropy, 3.300"
    assert line in summary_text(result)
    assert result_document(result, COMPARED)["heldout_nats_per_byte"] == 0.9
    unmeasured = replace(HISTORY, restored=replace(HISTORY.restored, heldout_loss=None))
    assert replace(result, history=unmeasured).heldout_nats_per_byte is None


def test_a_long_sample_shows_its_first_lines() -> None:
    sample = "\n".join(f"line {number}" for number in range(SAMPLE_LINES + 1))
    text = summary_text(replace(RESULT, sample=sample))
    assert text.endswith(f"| line {SAMPLE_LINES - 1}")
    assert result_document(replace(RESULT, sample=sample), COMPARED)["sample"] == sample


def test_a_run_without_a_step_says_so() -> None:
    assert "No step" in summary_text(replace(RESULT, history=replace(HISTORY, steps=())))


@pytest.mark.parametrize(
    ("heldout", "words"),
    [(2.0, "clearly below"), (3.25, "barely below"), (3.4, "NOT below"), (None, "not measured")],
)
def test_the_verdict_on_the_heldout_loss_is_honest(heldout: float | None, words: str) -> None:
    assert words in heldout_verdict(heldout, 3.3)
    assert "3.300" in heldout_verdict(heldout, 3.3)


def test_a_volunteers_name_cannot_send_control_characters_to_the_terminal() -> None:
    evil = contribution(ANNA, "\x1b[2Jeve\n", 0, 1)
    history = replace(HISTORY, contributions=(evil,), names={ANNA: "\x1b[2Jeve"})
    text = summary_text(RunResult(history, COORDINATOR, 3.3, "\x1b]0;title\x07"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[2Jeve" in text
    assert "\x1b" not in protocol_label("/\x1b/1")


def test_the_json_has_exactly_the_documented_form() -> None:
    document = json.loads(json.dumps(result_document(RESULT, COMPARED), allow_nan=False))
    assert list(document) == [
        "version", "steps", "heldout_loss", "heldout_nats_per_byte", "tokens_per_second", "peers",
        "unigram_entropy", "sample", "kill", "reference",
    ]  # fmt: skip
    assert document["version"] == 1
    assert document["steps"][1] == {"step": 2, "loss": 4.5, "tokens": 16_384, "seconds": 1.0}
    assert document["peers"][0] == {
        "peer": ANNA, "name": "anna", "stage": 0, "microbatches": 24, "tokens": 24_576
    }  # fmt: skip
    assert document["sample"] == RESULT.sample
    assert document["kill"] is None
    assert document["reference"] == {"losses": [5.5, 4.5], "equal": True}


def test_the_json_of_a_run_with_a_kill_names_both_volunteers() -> None:
    kill = Kill("bert", 4242, "was ended by SIGKILL", 1, "anna")
    assert result_document(replace(RESULT, kill=kill), COMPARED)["kill"] == {
        "victim": "bert", "pid": 4242, "exit": "was ended by SIGKILL", "after_step": 1,
        "newcomer": "anna", "joined_step": 1,
    }  # fmt: skip
    stranger = replace(kill, newcomer="cleo")
    assert result_document(replace(RESULT, kill=stranger), COMPARED)["kill"]["joined_step"] is None


def test_one_different_loss_makes_the_json_say_so() -> None:
    compared = [COMPARED[0], replace(COMPARED[1], alone=math.nan)]
    document = result_document(RESULT, compared)["reference"]
    assert document == {"losses": [5.5, None], "equal": False}


def test_a_diverged_loss_is_null_in_json() -> None:
    steps = (HistoryStep(Step(1), math.nan, 16_384, 1.0, 0.0),)
    document = result_document(replace(RESULT, history=replace(HISTORY, steps=steps)), ())
    assert json.loads(json.dumps(document, allow_nan=False))["steps"][0]["loss"] is None
