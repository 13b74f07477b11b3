"""FLOPs of a middle stage and peak rates of devices, for model FLOPs utilisation.

Utilisation is the model's FLOPs over the device's peak in the same time (PaLM, Chowdhery et al.
2022, arXiv 2204.02311, appendix B): attention is counted in full although it is causal, and
recomputation is not counted. A multiply-add is two FLOPs. Norms, rotations and activation
functions are omitted, as usual.
"""

from __future__ import annotations

from swarm_shared.run.model_config import ModelConfig

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX A6000": 155.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Peak dense bfloat16 TFLOP/s with float32 accumulation, by NVIDIA's data sheets, which give twice
as much with sparsity. The longest key contained in a device's name applies."""


def layer_forward_flops_per_token(model: ModelConfig) -> int:
    """Return the forward FLOPs of one decoder layer: one multiply-add per matrix weight, and
    attention scores and values over all `sequence_length` positions."""
    attention_weights = 2 * model.hidden_size * (model.query_size + model.key_size)
    weights = attention_weights + 3 * model.hidden_size * model.intermediate_size
    return 2 * weights + 4 * model.sequence_length * model.query_size


def layer_training_flops_per_token(model: ModelConfig) -> int:
    """Return three times the forward FLOPs: backward has two products per product of forward."""
    return 3 * layer_forward_flops_per_token(model)


def peak_tflops(device_name: str) -> float | None:
    """Return the device's peak, or None when it is not in the table."""
    found = [name for name in PEAK_TFLOPS if name in device_name]
    return PEAK_TFLOPS[max(found, key=len)] if found else None
