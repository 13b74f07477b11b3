"""Sampling text from a trained model, one token at a time.

Owns the sampling loop; the tokenizer's `encode` and `decode` are parameters. There is no key/value
cache, so each token costs a whole forward pass: meant for a few lines at the end of a run, not for
serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from swarm_shared.model.llama import Stage

GREEDY_BELOW = 1e-6
"""Temperature below which the likeliest token is taken; the logits would overflow float32."""

TokenIds = Sequence[int] | npt.NDArray[Any]


def sample_text(
    stage_whole: Stage,
    encode: Callable[[str], TokenIds],
    decode: Callable[[Sequence[int]], str],
    end_of_text: int,
    prompt: str,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return `prompt` continued by `new_tokens` tokens; temperature 0 takes the likeliest token.

    The text ends where the model's output is not finite, as that of a diverged one.
    The model sees the last `sequence_length` tokens. Equal seeds give equal texts on one machine.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [int(token) for token in np.asarray(encode(prompt)).reshape(-1)] or [end_of_text]
    with torch.no_grad():
        for _ in range(new_tokens):
            token = _next_token(stage_whole, ids, temperature, generator)
            if token is None:
                break
            ids.append(token)
    return decode(ids)


def _next_token(
    stage: Stage, ids: Sequence[int], temperature: float, generator: torch.Generator
) -> int | None:
    window = ids[-stage.config.sequence_length :]
    window_1T = torch.tensor([window], dtype=torch.int64, device=stage.device)
    # Only the last position's logits are needed; the head is the widest matrix of the model.
    logits_V = stage.head(stage.hidden(window_1T)[:, -1:])[0, 0].cpu()
    if not torch.isfinite(logits_V).all():
        return None  # from which no token can be drawn
    if temperature < GREEDY_BELOW:
        return int(logits_V.argmax())
    probability_V = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probability_V, 1, generator=generator))
