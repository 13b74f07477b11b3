"""The reference against a loop written with torch's own tools only."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kits.client.fake_accelerator import FakeAccelerator, device_of
from kits.manifests import equal_stages, manifest_of
from swarm_coordinator.offline.reference import (
    StepRecord,
    evaluate,
    train_reference,
    usable_device,
)
from swarm_shared.base.errors import UsageError
from swarm_shared.model.initialise import build_whole
from swarm_shared.model.optimizer import fingerprint
from swarm_shared.run.codec_sizes import AverageCodec
from swarm_shared.run.manifest import (
    Manifest,
)

STEPS = 6


def manifest(
    tied: bool = False, staleness: int = 0, average: AverageCodec = "exact", stages: int = 1
) -> Manifest:
    return manifest_of(
        model={
            "vocabulary_size": 50, "hidden_size": 32, "intermediate_size": 48, "layers": 2,
            "heads": 2, "sequence_length": 16, "tie_embeddings": tied,
        },
        stages=equal_stages(2, stages),
        training={
            "steps": 12, "microbatches_per_step": 3, "sequences_per_microbatch": 4, "seed": 4,
            "staleness": staleness,
        },
        optimizer={
            "learning_rate": 0.02, "warmup_steps": 2, "clip_norm": 0.5, "weight_decay": 0.1,
        },
        codecs={"average": average},
    )  # fmt: skip


def samples(step: int):
    """Sequences that count upwards: easy to learn, different in every step."""
    random = np.random.default_rng(step)
    batches = []
    for _ in range(3):
        tokens = (random.integers(0, 50, (4, 1)) + np.arange(17)) % 50
        batches.append((tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int64)))
    return batches


def run(described: Manifest, steps: int = STEPS, threads: int | None = 1):
    records: list[StepRecord] = []
    stage = train_reference(described, samples, steps, records.append, threads=threads)
    return stage, records


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("average", ["exact", "none"])
@pytest.mark.parametrize(("tied", "staleness"), [(False, 0), (True, 0), (False, 1), (True, 1)])
def test_losses_and_parameters_equal_those_of_a_plain_torch_loop(tied, staleness, average, stages):
    described = manifest(tied, staleness, average, stages)
    stage, records = run(described)
    plain = build_whole(described)
    versions = [values_of(plain)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=(0.9, 0.95),
        eps=1e-6,
        foreach=True,
    )
    for step in range(1, STEPS + 1):
        # One large batch, the mean taken by torch: another route to the same numbers.
        inputs, targets = (
            torch.from_numpy(np.concatenate(part)).long()
            for part in zip(*samples(step), strict=True)
        )
        used = versions[max(0, step - 1 - staleness)]
        for value in used.values():
            value.requires_grad_()
            value.grad = None
        logits = torch.func.functional_call(plain, used, (inputs,))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in plain.named_parameters():
            parameter.grad = used[name].grad
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert norm > 0.5, "the test must clip"
        warm = 0.02 * step / 2
        cosine = 0.002 + 0.018 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 10))
        for group in optimizer.param_groups:
            group["lr"] = warm if step <= 2 else cosine
        optimizer.step()
        versions.append(values_of(plain))
        record = records[step - 1]
        assert record.step == step
        assert record.tokens == 3 * 4 * 16
        assert record.loss == pytest.approx(loss.item(), rel=1e-6)
    difference = sum(
        (a - b).square().sum().item()
        for a, b in zip(stage.parameters(), plain.parameters(), strict=True)
    )
    size = sum(parameter.square().sum().item() for parameter in plain.parameters())
    # Torch sums in another order, and Adam magnifies rounding where gradients are tiny.
    assert math.sqrt(difference / size) < 3e-5


def test_the_loss_falls_and_the_held_out_loss_with_it():
    described = manifest()
    before = evaluate(build_whole(described), samples(1000))
    stage, records = run(described, steps=12)
    assert records[0].loss == pytest.approx(math.log(50), rel=0.05)
    assert records[-1].loss < 0.8 * records[0].loss
    assert evaluate(stage, samples(1000)) < 0.8 * before


def test_a_run_is_repeatable_to_the_bit_and_fewer_steps_are_a_prefix():
    first, first_records = run(manifest())
    second, second_records = run(manifest())
    assert fingerprint(first) == fingerprint(second)
    assert [r.loss for r in first_records] == [r.loss for r in second_records]
    _, fewer = run(manifest(), steps=3)
    assert [r.loss for r in fewer] == [r.loss for r in first_records[:3]]


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    run(manifest(), steps=1, threads=before + 1)
    assert torch.get_num_threads() == before


def test_evaluation_leaves_no_gradients_and_is_a_mean_per_token():
    stage = build_whole(manifest())
    both = evaluate(stage, samples(1))
    parts = [evaluate(stage, [batch]) for batch in samples(1)]
    assert both == pytest.approx(sum(parts) / 3, rel=1e-6)
    assert all(parameter.grad is None for parameter in stage.parameters())


def test_a_gradient_that_lags_a_step_behind_makes_another_run_from_the_second_step_on():
    at_once, lagging = run(manifest(), steps=3), run(manifest(staleness=1), steps=3)
    losses = [[record.loss for record in records] for _, records in (at_once, lagging)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    assert fingerprint(at_once[0]) != fingerprint(lagging[0])


@pytest.mark.parametrize(("average", "staleness"), [("exact", 0), ("exact", 1), ("none", 0)])
def test_microbatches_may_be_computed_on_another_device(average, staleness):
    described = manifest(False, staleness, average, 2)
    # Grouped heads have a kernel of their own on the processor.
    model = described.model.model_copy(update={"key_value_heads": described.model.heads})
    described = described.model_copy(update={"model": model})
    fake, records = FakeAccelerator("cuda"), []
    with fake.at_work():
        stage = train_reference(
            described, samples, STEPS, records.append, threads=1, device=fake.device
        )
        assert fake.calls["aten::mm"], "products were computed there"
        assert {device_of(one).type for one in stage.parameters()} == {"cpu"}
    expected, expected_records = run(described)
    assert [one.loss for one in records] == [one.loss for one in expected_records]
    for name, value in values_of(expected).items():
        assert torch.equal(value, values_of(stage)[name])


def test_a_device_that_is_not_there_is_refused_with_what_to_give_instead():
    assert usable_device("cpu") == torch.device("cpu")
    for name in ("toaster", "cuda:99"):
        with pytest.raises(UsageError, match=f"'{name}' here; give cpu, or cuda:0"):
            usable_device(name)
