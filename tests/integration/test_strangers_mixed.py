"""A run of which a third of each stage lies, until every kind of modified client was in it."""

from __future__ import annotations

import pytest

from kits.attack.mixed_run import STAGES, STEPS, MixedRun, settings

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(1800)]


def test_a_third_of_liars_of_every_kind_changes_no_bit(make_run) -> None:
    mixed = MixedRun(make_run(STAGES, STEPS, **settings(liars=True)))
    mixed.start(liars=True)
    mixed.train()
    mixed.check()
