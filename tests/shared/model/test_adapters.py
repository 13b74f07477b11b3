"""Low-rank adapters: what is trained and what is frozen, their first values, states and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kits.manifests import manifest_of, stage_ranges
from swarm_shared.base.errors import ProtocolError
from swarm_shared.model import (
    FlatLayout,
    Stage,
    apply_step,
    build_stage,
    fingerprint,
    initialise,
    initialise_trained,
    load_frozen,
    load_state,
    make_optimizer,
    state_to_tensors,
)
from swarm_shared.model.initialise import build_whole
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import ALL_TARGETS, AdapterConfig, ModelConfig
from swarm_shared.scheduling.placement.memory_need import check_stage_memory, least_stage_memory
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

RANK = 3


def config(targets: tuple[Any, ...] = ALL_TARGETS, rank: int = RANK, **blocks: Any) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=61, hidden_size=16, intermediate_size=40, layers=3, heads=4,
        key_value_heads=2, sequence_length=12,
        adapters=AdapterConfig(rank=rank, alpha=6.0, targets=targets), **blocks,
    )  # fmt: skip


def manifest(model: ModelConfig, *ends: int) -> Manifest:
    return manifest_of(model=model, stages=stage_ranges(*ends))


def tokens(stage: Stage) -> torch.Tensor:
    return torch.arange(24).view(2, 12) % stage.config.vocabulary_size


def test_adapters_alone_are_trained_and_named_as_in_peft() -> None:
    stage = build_stage(manifest(config(("q_proj", "down_proj")), 1, 3), 0)
    layer = "model.layers.0"
    shapes = [
        (f"{layer}.self_attn.q_proj.lora_A.weight", (RANK, 16)),
        (f"{layer}.self_attn.q_proj.lora_B.weight", (16, RANK)),
        (f"{layer}.mlp.down_proj.lora_A.weight", (RANK, 40)),
        (f"{layer}.mlp.down_proj.lora_B.weight", (16, RANK)),
    ]
    assert [(name, tuple(p.shape)) for name, p in stage.all_parameters()] == shapes
    assert [(one.name, one.shape) for one in FlatLayout.of(stage).entries] == shapes
    frozen = {name for name, _ in stage.frozen_parameters()}
    assert frozen == {
        name for name, _ in build_stage(manifest(stage.config.base, 1, 3), 0).all_parameters()
    }


def test_a_tied_table_is_frozen_in_both_ends() -> None:
    described = manifest(config(tie_embeddings=True), 1, 3)
    stages = [build_stage(described, index) for index in range(2)]
    assert [FlatLayout.of(stage).tied_count for stage in stages] == [0, 0]
    assert all("model.embed_tokens.weight" in dict(one.frozen_parameters()) for one in stages)
    assert not described.model.trains_tied_table
    assert described.model.base.trains_tied_table


def test_at_first_adapters_change_nothing_and_every_cut_begins_alike() -> None:
    described = manifest(config(), 1, 3)
    whole, base = build_whole(described), build_whole(manifest(described.model.base, 3))
    ids = tokens(whole)
    assert torch.equal(whole(ids), base(ids))
    values = dict(whole.all_parameters())
    for index in range(2):
        for name, parameter in build_stage(described, index).all_parameters():
            assert torch.equal(parameter, values[name])
    first = torch.cat(
        [p.flatten() for n, p in values.items() if "lora_A" in n and p.shape[1] == 16]
    )
    # peft's: uniform within 1 / sqrt(inputs).
    assert 0.23 < float(first.detach().abs().max()) < 0.25
    assert abs(float(first.detach().mean())) < 0.02
    assert float(first.detach().square().mean()) == pytest.approx(1 / 48, rel=0.1)


def test_a_return_to_the_seed_leaves_frozen_parameters() -> None:
    described = manifest(config(), 3)
    stage, expected = build_stage(described, 0), build_stage(described, 0)
    given_model = build_stage(described.model_copy(), 0)
    initialise(given_model, 77)
    load_frozen(stage, {name: p.detach() for name, p in given_model.frozen_parameters()})
    with torch.no_grad():
        for _, parameter in stage.all_parameters():
            parameter.fill_(9.0)
    initialise_trained(stage, described.training.seed)
    for (_, now), (_, then) in zip(stage.all_parameters(), expected.all_parameters(), strict=True):
        assert torch.equal(now, then)
    for (_, now), (_, then) in zip(
        stage.frozen_parameters(), given_model.frozen_parameters(), strict=True
    ):
        assert torch.equal(now, then)


def test_a_base_of_another_stage_is_refused_before_any_change() -> None:
    described = manifest(config(), 1, 3)
    first, second = build_stage(described, 0), build_stage(described, 1)
    before = {name: p.detach().clone() for name, p in first.named_parameters()}
    with pytest.raises(ProtocolError, match="not this stage's"):
        load_frozen(first, {name: p.detach() for name, p in second.frozen_parameters()})
    assert all(torch.equal(before[name], p) for name, p in first.named_parameters())


def test_a_state_holds_the_adapters_alone_and_continues_to_the_bit() -> None:
    described = manifest(config(), 1, 3)
    stages = [build_stage(described, 1) for _ in range(2)]
    one, other = [make_optimizer(stage, described.optimizer) for stage in stages]
    layout = FlatLayout.of(stages[0])

    def gradient(step: int) -> torch.Tensor:
        return torch.randn(layout.count, generator=torch.Generator().manual_seed(step))

    frozen = [p.detach().clone() for _, p in stages[0].frozen_parameters()]
    apply_step(one, layout, gradient(1), 0.05, 1.0)
    tensors = {n: t.clone() for n, t in state_to_tensors(stages[0], one).items()}
    size = stage_sizes(described)[1]
    assert sum(t.nbytes for t in tensors.values()) == size.state_bytes + 8
    load_state(stages[1], other, tensors)
    for stage, optimizer in zip(stages, (one, other), strict=True):
        apply_step(optimizer, layout, gradient(2), 0.05, 1.0)
        assert all(
            torch.equal(p, was)
            for (_, p), was in zip(stage.frozen_parameters(), frozen, strict=True)
        )
    assert fingerprint(stages[0], one) == fingerprint(stages[1], other)


@settings(max_examples=15)
@given(data=st.data())
def test_sizes_are_those_of_the_stages_and_no_honest_claim_is_below_the_bound(
    data: st.DataObject,
) -> None:
    from swarm_shared.model.profile import profile_layers
    from swarm_shared.run.stage_cut import stage_memory

    targets = tuple(
        data.draw(st.lists(st.sampled_from(ALL_TARGETS), min_size=1, max_size=7, unique=True))
    )
    norm, tied = data.draw(st.booleans()), data.draw(st.booleans())
    rank, dtype = data.draw(st.integers(1, 16)), data.draw(st.sampled_from(["float32", "bfloat16"]))
    staleness, exact = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    model = config(targets, rank, query_key_norm=norm, tie_embeddings=tied)
    described = manifest(model, *data.draw(st.sampled_from([(3,), (1, 3), (1, 2, 3)])))
    profile = profile_layers(model, 2, dtype)
    last = described.stage_count - 1
    training = described.training.model_copy(update={"dtype": dtype, "staleness": staleness})
    codecs = described.codecs.model_copy(update={"average": "exact" if exact else "none"})
    stages = tuple(
        cut.model_copy(
            update={
                "memory": stage_memory(
                    profile, cut, at == 0, at == last, staleness=staleness, exact=exact
                )
            }
        )
        for at, cut in enumerate(described.stages)
    )
    described = described.model_copy(
        update={"training": training, "codecs": codecs, "stages": stages}
    )
    check_stage_memory(described)
    for index, size in enumerate(stage_sizes(described)):
        with torch.device("meta"):
            stage = build_stage(described, index, "meta")
        assert size.parameters == sum(p.numel() for _, p in stage.all_parameters())
        assert size.frozen_parameters == sum(p.numel() for _, p in stage.frozen_parameters())
        assert size.frozen_bytes == 4 * size.frozen_parameters
    whole_training = described.model_copy(update={"model": model.base})
    for size, whole, one, other in zip(
        stage_sizes(described), stage_sizes(whole_training),
        least_stage_memory(described), least_stage_memory(whole_training), strict=True,
    ):  # fmt: skip
        if size.parameters < whole.parameters:  # not where the rank is near the matrices' width
            assert one.host_bytes < other.host_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"adapters": AdapterConfig(rank=17)}, "at most hidden_size"),
        ({"adapters": AdapterConfig(rank=2), "bottleneck_size": 4}, "bottlenecks"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        ModelConfig.model_validate(config(rank=0).model_dump() | change)


@pytest.mark.parametrize(
    "change", [{"targets": ()}, {"targets": ("q_proj", "q_proj")}, {"targets": ("lm_head",)},
               {"rank": -1}, {"alpha": 0.0}]
)  # fmt: skip
def test_bad_adapters_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AdapterConfig(**{"rank": 2, **change})


def test_a_manifest_has_adapters_in_every_stage() -> None:
    manifest(config(), 1, 3)
    with pytest.raises(ValidationError, match="every stage needs a layer"):
        manifest(config(), 3, 3)
