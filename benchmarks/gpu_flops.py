"""What a middle stage computes, and what devices could: for model FLOPs utilisation.

Utilisation is the FLOPs that the model asks for over what the device could do in the time (PaLM,
Chowdhery et al. 2022, arXiv 2204.02311, appendix B): attention is counted in full although it is
causal, and what is computed twice to save memory is counted once. A multiplication and an addition
are two FLOPs. Norms, rotations and activation functions are left out, as usual.
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
"""Dense bfloat16 with sums in float32, by NVIDIA's data sheets, which print twice as much where
they count with sparsity. The longest name that a device's name contains is taken."""


def layer_forward_flops_per_token(model: ModelConfig) -> int:
    """Of one decoder layer: every weight of a product is used in one multiply-add, and each
    position is compared with all `sequence_length` of them, and sums up as many values."""
    heads_width = model.heads * model.head_size
    key_value_width = model.key_value_heads * model.head_size
    attention_weights = model.hidden_size * (2 * heads_width + 2 * key_value_width)
    weights = attention_weights + 3 * model.hidden_size * model.intermediate_size
    return 2 * weights + 4 * model.sequence_length * heads_width


def layer_training_flops_per_token(model: ModelConfig) -> int:
    """Backward computes two gradients for each product of the forward pass."""
    return 3 * layer_forward_flops_per_token(model)


def peak_tflops(device_name: str) -> float | None:
    """None for a device that is not in the table."""
    found = [name for name in PEAK_TFLOPS if name in device_name]
    return PEAK_TFLOPS[max(found, key=len)] if found else None
