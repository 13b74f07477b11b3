"""Kernels with one order of sums, as far as a processor can show it."""

from __future__ import annotations

import os

import pytest
import torch

from swarm_shared.model import llama
from swarm_shared.model.host_copies import HostCopies
from swarm_shared.model.repeatable_kernels import WORKSPACE_VARIABLE, repeat_to_the_bit


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_only_cuda_is_asked_for_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    repeat_to_the_bit(torch.device(kind))
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE_VARIABLE not in os.environ


def test_on_cuda_torch_is_asked_and_a_setting_of_the_users_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    try:
        repeat_to_the_bit(torch.device("cuda", 0))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert os.environ[WORKSPACE_VARIABLE] == ":16:8"


def test_repeated_heads_attend_as_a_kernel_for_groups_does() -> None:
    generator = torch.Generator().manual_seed(1)
    q_BNTH = torch.randn(2, 6, 5, 4, generator=generator)
    k_BKTH, v_BKTH = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = attend(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
    repeated = attend(
        q_BNTH, llama._repeated(k_BKTH, 6), llama._repeated(v_BKTH, 6), is_causal=True
    )
    assert torch.equal(grouped, repeated)


def test_tensors_in_host_memory_are_not_copied() -> None:
    tensor = torch.ones(3)
    assert HostCopies([tensor]).of(tensor) is tensor
