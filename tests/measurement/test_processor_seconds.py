"""Where the seconds of processors are counted: categories, roles, and what perf prints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.throughput.processor_seconds import (
    CATEGORIES,
    CHECKS,
    DIGESTS,
    ENCRYPTION,
    FAULTS,
    KERNELS,
    LIBRARY,
    PRODUCTS,
    SYSTEM,
    THREADS,
    Role,
    category,
    counted,
    recording,
    role_of,
)
from swarm_shared.base.errors import SwarmError


@pytest.mark.parametrize(
    ("shared_object", "symbol", "expected"),
    [
        ("libtorch_cpu.so", "mkl_blas_def_sgemm_kernel_0_zen", PRODUCTS),
        ("libtorch_cpu.so", "at::native::aminmax_allreduce_kernel", CHECKS),
        ("libtorch_cpu.so", "Sleef_finz_expf16_u10avx512f", KERNELS),
        ("libgomp.so.1", "0x1e02a", THREADS),
        ("blake3.cpython-311-x86_64-linux-gnu.so", "_blake3_hash_many_avx512", DIGESTS),
        ("_rust.abi3.so", "ChaCha20_16x", ENCRYPTION),
        ("libc.so.6", "_int_malloc", LIBRARY),
        ("[kernel.kallsyms]", "clear_page_erms", FAULTS),
        ("[kernel.kallsyms]", "_copy_from_iter", SYSTEM),
        ("libpython3.11.so.1.0", "_PyEval_EvalFrameDefault", "Python, stage workers"),
    ],
)
def test_a_sample_of_a_stage_worker_has_one_category(
    shared_object: str, symbol: str, expected: str
) -> None:
    assert category(Role.STAGE, shared_object, symbol) == expected


def test_what_no_library_explains_is_python_of_the_process() -> None:
    for role in (Role.STAGE, Role.DAEMON, Role.COORDINATOR):
        found = category(role, "_pydantic_core.so", "validate")
        assert found == f"Python, {role}"
        assert found in CATEGORIES


@pytest.mark.parametrize("role", [Role.IDLE, Role.OTHER])
def test_idle_processors_and_other_programs_are_not_divided(role: Role) -> None:
    assert category(role, "[kernel.kallsyms]", "clear_page_erms") == role.value
    assert role.value in CATEGORIES


def test_a_process_has_its_role_by_its_command_line() -> None:
    assert role_of("python -m swarm_client.stage.worker --fd 9") is Role.STAGE
    assert role_of("python -m benchmarks.throughput.torch_pipeline /tmp/run --rank 1") is Role.STAGE
    assert role_of("python -m swarm_client.averaging.worker --fd 7") is Role.DAEMON
    assert role_of("/site-packages/hivemind/hivemind_cli/p2pd -quic=1") is Role.DAEMON
    assert role_of("python -m swarm_client join swarm1 --stage 1") is Role.DAEMON
    assert role_of("python -m swarm_coordinator start /tmp/run") is Role.COORDINATOR
    assert role_of("perf record -a") is Role.OTHER


SCRIPT = """\
7 1.000000:
\tffffffff81 clear_page_erms ([kernel.kallsyms])
\t7f0000 mkl_blas_def_sgemm_mscale (/venv/torch/lib/libtorch_cpu.so)

7 2.000000:
\tffffffff82 charge_memcg ([kernel.kallsyms])
\tffffffff83 asm_exc_page_fault ([kernel.kallsyms])

7 2.100000:
\t7f0000 at::native::(anonymous namespace)::aminmax(float (*)()) (/venv/lib/libtorch_cpu.so)

0 2.200000:
\tffffffff84 pv_native_safe_halt ([kernel.kallsyms])

8 2.300000:
\t7f0001 _PyEval_EvalFrameDefault (/usr/lib/libpython3.11.so.1.0)

7 3.000000:
\t7f0000 mkl_blas_def_sgemm_kernel_0_zen (/venv/torch/lib/libtorch_cpu.so)

"""


def test_only_samples_between_the_times_count_and_a_fault_counts_with_all_its_functions() -> None:
    found = counted(SCRIPT, {7: Role.STAGE}, 2.0, 3.0)
    assert dict(found) == {FAULTS: 1, CHECKS: 1, Role.IDLE: 1, Role.OTHER: 1}


def test_without_perf_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SwarmError, match="perf is needed"), recording(tmp_path / "perf.data"):
        pass
