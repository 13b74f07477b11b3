"""The doctor's document, its table and its exit code."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.doctor.report import (
    CHECKS,
    Check,
    Report,
    Results,
    State,
    ok,
    problem,
    skipped,
    table,
    warning,
)
from swarm_shared.base.errors import AdmissionError, CapacityError, InviteError, NetworkError


def report(*checks: Check) -> Report:
    found = {check.id: check for check in checks}
    rest = [skipped(id, "not here") for id in CHECKS if id not in found]
    return Report.of([*checks, *rest], 1_800_000_000.0, 2.5)


def test_without_a_problem_the_exit_code_is_zero() -> None:
    found = report(ok("python", "3.11"), warning("link", "slow", "Use a cable."))
    assert (found.exit_code, found.state) == (0, State.WARNING)
    assert report(ok("python", "3.11")).state is State.OK


def test_the_first_problem_in_the_order_of_causes_gives_the_exit_code() -> None:
    network = problem("coordinator", NetworkError, "silent", "Wait.")
    invite = problem("invite", InviteError, "damaged", "Copy it.")
    for order in ([network, invite], [invite, network]):
        assert report(*order).exit_code == InviteError.exit_code == 4
    memory = problem("device", CapacityError, "too little", "Free some.")
    assert report(network, memory).exit_code == CapacityError.exit_code == 6


def test_what_was_not_finished_is_reported() -> None:
    found = Report.of([ok("python", "3.11")], 0.0, 25.0)
    assert [check.id for check in found.checks] == list(CHECKS)
    assert all(check.state is State.WARNING for check in found.checks[1:])
    assert found.exit_code == 0


def test_the_document_is_json_with_a_version_and_comes_back_as_it_was() -> None:
    found = report(ok("clock", "0.1 s ahead", ahead_seconds=0.1))
    document = json.loads(found.model_dump_json())
    assert (document["document"], document["version"]) == ("swarm-client doctor", 1)
    assert list(document["checks"][0]) == ["id", "state", "seen", "fix", "exit_code", "details"]
    clock = next(check for check in document["checks"] if check["id"] == "clock")
    assert clock["details"] == {"ahead_seconds": 0.1}
    assert Report.model_validate(document) == found


def test_the_first_result_of_a_check_stays() -> None:
    results = Results()
    results.put(problem("invite", InviteError, "damaged", "Copy it."))
    results.skip(("invite", "link"), "no reason")
    assert [check.state for check in results.all()] == [State.PROBLEM, State.SKIPPED]
    with pytest.raises(AssertionError):
        results.put(ok("wheather", "sunny"))


@given(st.integers(0, 200), st.text(st.sampled_from("ab c"), max_size=300))
def test_the_table_has_every_check_and_keeps_its_width(columns: int, text: str) -> None:
    found = report(problem("python", InviteError, text, text or "Nothing."), ok("torch", text))
    lines = table(found, columns).splitlines()
    for title in CHECKS.values():
        assert any(title in line for line in lines)
    longest_word = max((len(word) for word in text.split()), default=0)
    assert max(map(len, lines)) <= max(columns, 70, longest_word + 30)


def test_the_table_tells_the_fix_and_counts() -> None:
    found = report(
        problem("invite", InviteError, "damaged", "Copy it again."),
        warning("link", "slow", "Use a cable."),
    )
    text = table(found, 80)
    assert "FAIL  Invite" in text
    assert "-> Copy it again." in text
    assert text.endswith(f"1 problem, 1 warning, {len(CHECKS) - 2} skipped (checked in 2.5 s)")
    every = Report.of([ok(id, "fine") for id in CHECKS], 0.0, 1.0)
    assert table(every, 80).endswith("everything is in order (checked in 1.0 s)")


def test_what_a_coordinator_says_does_not_steer_the_terminal() -> None:
    said = "the run refuses: \x1b[2J\x1b]0;title\x07\r\n\N{RIGHT-TO-LEFT OVERRIDE}"
    text = table(report(problem("admission", AdmissionError, said, "Ask.")), 80)
    assert all(line.isprintable() for line in text.splitlines())
    assert "the run refuses" in text
