"""A real run that trains adapters of a given model, under churn, and its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from integration.test_given_model import LLAMA, save_model
from swarm_coordinator.cli.main import run as run_command

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(420)]

STEPS = 8


def test_a_death_and_a_join_change_no_bit_and_peft_loads_the_export(
    make_run, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    save_model(LLAMA, given)
    run = make_run(
        2, STEPS, given_model=given, adapters__rank=4, codecs__average="exact",
        checkpoint__every_steps=100,
    )  # fmt: skip
    swarm = run.swarm
    invite = swarm.start_coordinator()
    volunteers = [swarm.start_volunteer(invite, stage=number % 2) for number in range(4)]
    run.wait_for_version(3)
    # Two hold stage 0; a joining peer has the base from the organiser, the adapters from a peer.
    run.kill(volunteers[0])
    swarm.start_volunteer(invite, stage=0)
    swarm.watch()
    assert swarm.wait_for_exit() == []

    run.assert_equals_reference()
    folder = str(run.folder.path)
    assert run_command(["export", folder, str(tmp_path / "adapters")]) == 0
    assert run_command(["export", folder, str(tmp_path / "merged"), "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32)
    tokens = torch.randint(0, 400, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits
    assert float((adapted - merged).abs().max()) < 1e-4
    assert float((adapted - alone).abs().max()) > 1e-3
