"""A visitor's pass holds for one peer, one run, a few minutes, and no other purpose."""

from __future__ import annotations

import base64

import pytest

from kits.members import certificate
from swarm_shared.base.errors import AdmissionError
from swarm_shared.base.types import RunId
from swarm_shared.identity.credentials import (
    CLOCK_SKEW_SECONDS,
    check_certificate,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.probe_pass import PASS_SECONDS, check_probe_pass, sign_probe_pass

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
ORGANISER, VISITOR, STRANGER = (Identity.from_seed(bytes([i]) * 32) for i in (1, 2, 3))
NOW = 1_800_000_000.0
PASS = sign_probe_pass(ORGANISER, VISITOR.peer_id, RUN, NOW)


def test_a_pass_lets_its_visitor_in_while_it_is_valid() -> None:
    for now in (NOW, NOW + PASS_SECONDS, NOW + PASS_SECONDS + CLOCK_SKEW_SECONDS):
        check_probe_pass(PASS, RUN, ORGANISER.peer_id, now, VISITOR.peer_id)


def test_a_pass_of_another_kind_is_refused() -> None:
    late = NOW + PASS_SECONDS + CLOCK_SKEW_SECONDS + 1
    forged = sign_probe_pass(STRANGER, VISITOR.peer_id, RUN, NOW)
    for text, run, now, remote in (
        (PASS, RUN, late, VISITOR), (PASS, OTHER_RUN, NOW, VISITOR), (PASS, RUN, NOW, STRANGER),
        (forged, RUN, NOW, VISITOR), ("", RUN, NOW, VISITOR), ("not base64!", RUN, NOW, VISITOR),
    ):  # fmt: skip
        with pytest.raises(AdmissionError):
            check_probe_pass(text, run, ORGANISER.peer_id, now, remote.peer_id)


def test_a_pass_is_no_certificate_and_a_certificate_no_pass() -> None:
    with pytest.raises(AdmissionError):
        check_certificate(
            base64.b64decode(PASS), RUN, ORGANISER.peer_id, NOW, VISITOR.peer_id
        )  # fmt: skip
    text = certificate(VISITOR.peer_id, RUN, ORGANISER, now=NOW)
    with pytest.raises(AdmissionError):
        check_probe_pass(text, RUN, ORGANISER.peer_id, NOW, VISITOR.peer_id)
