"""What an OTLP/HTTP receiver has of a run's steps, decoded as any receiver decodes it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kits.coordinator import run as run_kit
from kits.coordinator.otlp_receiver import OtlpReceiver, otlp_receiver, values
from swarm_coordinator.core.events import StepPart
from swarm_coordinator.tracking import opentelemetry_traces
from swarm_coordinator.tracking.opentelemetry_traces import OpenTelemetryTraces, traces_url
from swarm_coordinator.tracking.targets import TrackedRun
from swarm_coordinator.tracking.trace_reader import StepEvent, StepTrace
from swarm_shared.base.errors import NetworkError, UsageError
from swarm_shared.base.types import StageIndex

RUN = TrackedRun("0123456789ab", "my-run", Path("unused"))
DECIDED_AT = 1_800_000_000.5
"""Unix seconds of the decision to apply step 7."""

STEP = StepTrace(
    step=7, attempt=9, earlier=0, decided_at=DECIDED_AT, seconds=0.5, loss=2.5, learning_rate=1e-3,
    global_norm=1.5, tokens=32, peers=2, stages=2, parts=run_kit.times(7).parts,
    events=(
        StepEvent(DECIDED_AT - 1.0, "Anna was admitted", run_kit.ANNA),
        StepEvent(DECIDED_AT + 0.125, "stage 1 is held again", None),
    ),
)  # fmt: skip


def send(receiver: OtlpReceiver, *steps: StepTrace) -> list[list[Span]]:
    target = OpenTelemetryTraces(RUN, receiver.url)
    for step in steps:
        target.put(step)
    target.flush()
    target.close()
    return receiver.traces()


def seconds_from_decision(span: Span) -> tuple[float, float]:
    decided = round(DECIDED_AT * 1e9)
    return (
        (span.start_time_unix_nano - decided) / 1e9, (span.end_time_unix_nano - decided) / 1e9
    )  # fmt: skip


def test_the_parts_of_a_step_are_spans_at_their_times_below_one_root(
    receiver: OtlpReceiver,
) -> None:
    [spans] = send(receiver, STEP)
    assert receiver.paths == {"/v1/traces"}
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) == 8
    found = {
        span.name: (by_id[span.parent_span_id].name if span.parent_span_id else None,
                    *seconds_from_decision(span), values(span.attributes).get("swarm.stage"))
        for span in spans
    }  # fmt: skip
    assert found == {
        "step": (None, -0.5, 0.25, None),
        "compute": ("step", -0.5, -0.25, None),
        "close": ("step", -0.2, 0.0, None),
        "average stage 0": ("close", -0.2, -0.05, 0),
        "average stage 1": ("close", -0.1, 0.0, 1),
        "apply": ("step", 0.0, 0.25, None),
        "apply stage 0": ("apply", 0.0, 0.25, 0),
        "apply stage 1": ("apply", 0.0, 0.125, 1),
    }


def test_the_root_has_the_numbers_and_the_events_of_the_step(receiver: OtlpReceiver) -> None:
    [[root, *_]] = send(receiver, STEP)
    assert root.name == "step"
    assert values(root.attributes) == {
        "swarm.step": 7, "swarm.version.before": 6, "swarm.step.attempt": 9,
        "swarm.step.repetition": 0, "swarm.step.seconds": 0.5, "swarm.loss": 2.5,
        "swarm.learning_rate": 1e-3, "swarm.gradient_norm": 1.5, "swarm.tokens": 32,
        "swarm.peers": 2, "swarm.stages": 2,
    }  # fmt: skip
    assert [(one.time_unix_nano, one.name, values(one.attributes)) for one in root.events] == [
        (round((DECIDED_AT - 1.0) * 1e9), "Anna was admitted", {"swarm.peer.id": run_kit.ANNA}),
        (round((DECIDED_AT + 0.125) * 1e9), "stage 1 is held again", {}),
    ]
    [of_resource] = receiver.requests[0].resource_spans
    about = values(of_resource.resource.attributes)
    assert (about["service.name"], about["swarm.run.id"], about["swarm.run.name"]) == (
        "swarmtrain", "0123456789ab", "my-run",
    )  # fmt: skip


def test_no_event_has_the_address_of_a_volunteer(receiver: OtlpReceiver) -> None:
    notes = (
        "stage 1 could not be fetched: /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW did not answer",
        "an attempt failed: [2001:db8::7]:4001 ended the stream",
    )
    events = tuple(StepEvent(DECIDED_AT, note, run_kit.ANNA) for note in notes)
    [[root, *_]] = send(receiver, replace(STEP, events=events))
    assert [event.name for event in root.events] == [
        "stage 1 could not be fetched: (address) did not answer",
        "an attempt failed: (address) ended the stream",
    ]
    sent = receiver.requests[0].SerializeToString()
    assert b"203.0.113.7" not in sent
    assert b"2001:db8" not in sent


def test_a_step_of_which_no_times_are_recorded_lasts_as_long_as_the_run_counts(
    receiver: OtlpReceiver,
) -> None:
    [[root]] = send(receiver, replace(STEP, parts=(), loss=math.nan))
    assert seconds_from_decision(root) == (-0.5, 0.0)
    assert "swarm.loss" not in values(root.attributes), "a loss that is no number"


def test_an_attempt_that_failed_is_marked_as_an_error(receiver: OtlpReceiver) -> None:
    failed = StepPart("failed attempt", StageIndex(1), -0.2, -0.15)
    [spans] = send(receiver, replace(STEP, parts=(*STEP.parts, failed)))
    errors = [span for span in spans if span.status.code == Status.STATUS_CODE_ERROR]
    assert [(span.name, seconds_from_decision(span)) for span in errors] == [
        ("failed attempt stage 1", (-0.2, -0.15))
    ]


def test_ids_are_those_of_the_step_at_every_start_and_others_for_its_repetition(
    receiver: OtlpReceiver,
) -> None:
    def ids() -> list[tuple[bytes, bytes, bytes]]:
        return [(span.trace_id, span.span_id, span.parent_span_id) for span in receiver.spans()]

    send(receiver, STEP)
    first = ids()
    receiver.requests.clear()
    send(receiver, STEP)
    assert ids() == first
    repeated = replace(STEP, attempt=10, earlier=1)
    assert len(send(receiver, repeated, replace(STEP, step=8))) == 3
    assert len({trace_id for trace_id, _, _ in ids()}) == 3
    assert len({span_id for _, span_id, _ in ids()}) == 3 * len(first)


def test_a_sampler_of_the_environment_leaves_out_whole_traces(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    traces = send(receiver, *(replace(STEP, step=number) for number in range(1, 41)))
    assert 0 < len(traces) < 40
    assert {len(spans) for spans in traces} == {8}


def test_many_spans_are_sent_in_several_requests(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opentelemetry_traces, "SPANS_PER_REQUEST", 10)
    assert len(send(receiver, STEP, replace(STEP, step=8), replace(STEP, step=9))) == 3
    assert len(receiver.requests) == 3  # of 24 spans


def test_what_the_receiver_does_not_take_is_an_error_with_its_reason(
    receiver: OtlpReceiver,
) -> None:
    target = OpenTelemetryTraces(RUN, receiver.url)
    target.put(STEP)
    receiver.status = 404
    with pytest.raises(NetworkError, match=r"did not take the spans \(.*404.*Not Found"):
        target.flush()
    target.close()


def test_of_a_receiver_that_is_down_the_systems_reason_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The exporter has a second attempt, after a second, and logs why.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with otlp_receiver() as ended:
        url = ended.url
    target = OpenTelemetryTraces(RUN, url)
    target.put(STEP)
    with pytest.raises(NetworkError, match=r"the spans \(\[Errno \d+\] Connection refused\);"):
        target.flush()
    target.close()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://example.org/otlp", "https://example.org/otlp/v1/traces"),
        ("https://example.org/v1/traces", "https://example.org/v1/traces"),
        ("https://example.org/otlp?key=1", "https://example.org/otlp/v1/traces?key=1"),
    ],
)
def test_a_receiver_may_be_named_without_the_path(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4318", "grpc://localhost:4317", "http://", "http://[::1", "http://host:port", ""],
)
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="it looks like http://localhost:4318"):
        traces_url(endpoint)
