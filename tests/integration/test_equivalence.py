"""The heart of it: a run under churn computes what one reliable machine would compute."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.runs, pytest.mark.timeout(420)]


@pytest.mark.parametrize(("stages", "average"), [(2, "exact"), (3, "none")])
def test_twenty_steps_with_one_joining_and_one_leaving_equal_a_single_process(
    make_run, stages: int, average: str
) -> None:
    run = make_run(stages, steps=20, codecs__average=average)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(2 * stages):
        swarm.start_volunteer(invite)

    run.wait_for_version(5)
    newcomer = swarm.start_volunteer(invite)
    run.wait_for_version(12)
    leaver = swarm.volunteers[0]
    swarm.expect_exit(leaver)
    leaver.signal(signal.SIGINT)
    swarm.watch(lambda *_: None)

    history = run.history_at_its_end()
    assert leaver.exit_code() == 0
    assert "contributed" in leaver.last_lines(1)[0]
    by_name = {peer.name: peer.peer for peer in history.peers}
    counted = {c.peer for c in history.contributions if c.microbatches > 0}
    assert by_name[newcomer.name] in counted
    assert sum(c.microbatches for c in history.contributions) == 20 * 12 * stages
    assert {link.protocol for link in history.links} >= {
        "/swarmtrain/stage/1",
        "all-reduce over p2pd",
    }
    run.assert_equals_reference()


def test_tied_embeddings_are_summed_across_the_first_and_last_stage(make_run) -> None:
    run = make_run(2, steps=5, model__tie_embeddings=True)
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(4):
        swarm.start_volunteer(invite)
    swarm.watch(lambda *_: None)

    assert swarm.wait_for_exit() == []
    run.assert_equals_reference()


def test_a_bfloat16_run_follows_a_bfloat16_process(make_run) -> None:
    run = make_run(
        2, steps=3, training__dtype="bfloat16", training__microbatches_per_step=4,
        model__sequence_length=32, limits__starting_peers_per_stage=1,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    for _ in range(2):
        swarm.start_volunteer(invite)
    swarm.watch(lambda *_: None)

    # Sums of microbatches differ in their last float32 bits, which bfloat16 then rounds.
    assert run.losses() == pytest.approx(run.reference_losses(), rel=1e-3)
