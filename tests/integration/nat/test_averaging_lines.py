"""How the members of a stage average over lines with rates and delays, in an emulated network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wan.links.network import why_no_network, wide_area_network
from benchmarks.wan.mixes import Link
from swarm_coordinator.storage.history import History

pytestmark = [pytest.mark.lab, pytest.mark.nightly, pytest.mark.timeout(300)]

GOOD = Link(up_mbit=60, down_mbit=60, rtt_ms=20)
THIN = Link(up_mbit=4, down_mbit=50, rtt_ms=20)
P2PD = "all-reduce over p2pd"


@pytest.fixture
def trained(make_run: Callable[..., Any], tmp_path: Path) -> Callable[..., History]:
    """A run over such lines to its end, equal to the reference; members are given with the stage
    that they hold. Without limits, so that p2pd is used."""
    if (reason := why_no_network()) is not None:
        pytest.skip(reason)

    def train(members: dict[str, tuple[Link, int]], steps: int, **settings: object) -> History:
        stages = 1 + max(stage for _, stage in members.values())
        least = min(sum(s == stage for _, s in members.values()) for stage in range(stages))
        run = make_run(
            stages, steps=steps, limits__starting_peers_per_stage=least,
            network__listen_host="0.0.0.0", **settings,
        )  # fmt: skip
        lines = {name: line for name, (line, _) in members.items()} | {"coordinator": GOOD}
        with wide_area_network(lines, tmp_path / "network") as network:
            run.swarm.prefix = network.hosts["coordinator"].prefix
            invite = run.swarm.start_coordinator()
            for name, (_, stage) in members.items():
                run.swarm.prefix = network.hosts[name].prefix
                assert run.swarm.start_volunteer(invite, stage).name == name
            run.swarm.watch()
            history: History = run.history_at_its_end()
        run.assert_equals_reference()
        return history

    return train


def sent_between(history: History) -> dict[tuple[str, str, str], int]:
    """Bytes by who sent them, to whom, by which carrier."""
    name_of = {peer: str(name) for peer, name in history.names.items()}
    return {
        (name_of[link.reporter], name_of[link.remote], link.protocol): link.sent
        for link in history.links
        if "all-reduce" in link.protocol
    }


def test_members_that_dial_each_other_at_the_same_moment_average_over_p2pd_all_the_same(
    trained: Callable[..., History],
) -> None:
    """With a delay between them, both ends of a pair are on their way before one arrives."""
    names = ("volunteer-1", "volunteer-2", "volunteer-3")
    history = trained(dict.fromkeys(names, (GOOD, 0)), steps=3)
    assert sent_between(history).keys() == {(a, b, P2PD) for a, b in permutations(names, 2)}


def test_who_has_a_thin_line_is_found_out_and_sums_less_of_the_gradients(
    trained: Callable[..., History],
) -> None:
    """What the line takes is learnt from the activations, which it is far too thin for: there are
    many of them, and hardly any computing in between, however slow this machine is."""
    history = trained(
        {
            "volunteer-1": (GOOD, 0),
            "volunteer-2": (GOOD, 0),
            "volunteer-3": (THIN, 0),
            "volunteer-4": (GOOD, 1),
        },
        steps=6,
        model__layers=2,
        training__microbatches_per_step=36,
    )
    sent: dict[str, int] = {}
    for (sender, _, _), size in sent_between(history).items():
        sent[sender] = sent.get(sender, 0) + size
    # One vector instead of one and a half; equal shares in the first steps, until it is known.
    assert sent["volunteer-3"] < 0.85 * min(sent["volunteer-1"], sent["volunteer-2"])
