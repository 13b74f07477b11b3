"""Sampling text."""

from __future__ import annotations

import math

import pytest
import torch

from swarm_coordinator.offline.sampling import sample_text
from swarm_shared.data.tokenizer import BytesTokenizer
from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

MODEL = ModelConfig(
    vocabulary_size=256, hidden_size=32, intermediate_size=48, layers=2, heads=2,
    key_value_heads=1, sequence_length=16,
)  # fmt: skip
BYTES = BytesTokenizer()


def untrained() -> Stage:
    stage = Stage(MODEL, StageRange(first_layer=0, end_layer=2), is_first=True, is_last=True)
    initialise(stage, 1)
    return stage


def counting() -> Stage:
    """A model that has learnt that letters follow each other in the alphabet."""
    stage = untrained()
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    letters = torch.arange(26 * 3) % 26 + ord("a")
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        starts = torch.randint(0, 26, (16,), generator=generator).tolist()
        rows = torch.stack([letters[start : start + 17] for start in starts])
        optimizer.zero_grad()
        (stage(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / 256).backward()
        optimizer.step()
    return stage


def test_a_trained_model_continues_the_prompt_beyond_its_window():
    text = sample_text(counting(), BYTES.encode, BYTES.decode, 0, "abcdef", 40, 0.0, 0)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert text == (alphabet * 2)[: len("abcdef") + 40]


def sample(prompt: str = "x", seed: int = 1, temperature: float = 1.0) -> list[int]:
    found: list[int] = []
    sample_text(
        untrained(),
        BYTES.encode,
        lambda ids: found.extend(ids) or "",
        BYTES.end_of_text,
        prompt,
        30,
        temperature,
        seed,
    )
    return found


def test_equal_seeds_give_equal_texts_and_others_do_not():
    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert sample(seed=1, temperature=0.0) == sample(seed=2, temperature=0.0)


def test_an_empty_prompt_starts_from_the_mark_between_documents():
    ids = sample(prompt="")
    assert ids[0] == 0
    assert len(ids) == 31


def test_a_low_temperature_sticks_to_likely_tokens():
    stage = untrained()
    ids = torch.tensor([sample(temperature=1e-5)])
    with torch.no_grad():
        likeliest = stage(ids[:, :16]).argmax(-1)
    assert torch.equal(likeliest[0, :-1], ids[0, 1:16])


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_not_finite_writes_nothing(wrong: float, temperature: float) -> None:
    """Its evaluation says that the loss is no number, and does not fail at the text."""
    model = untrained()
    with torch.no_grad():
        next(model.parameters()).fill_(wrong)
    text = sample_text(model, BYTES.encode, BYTES.decode, 0, "abc", 5, temperature, 0)
    assert text == "abc"
