"""The learning rate and the clip factor of an optimizer step.

Two pure functions, free of torch because the coordinator calls them too. The optimizer is in
`swarm_shared.model.optimizer`. Linear warm-up and cosine decay as in Loshchilov & Hutter (arXiv
1608.03983); clipping by the global norm as in Pascanu et al. (arXiv 1211.5063), with the epsilon
that `torch.nn.utils.clip_grad_norm_` uses.
"""

from __future__ import annotations

import math

from swarm_shared.base.errors import SwarmError
from swarm_shared.run.manifest import OptimizerConfig

CLIP_EPSILON = 1e-6


def learning_rate(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """Return the rate of `step`, counted from 1.

    The peak is reached at step `warmup_steps` (at once without warm-up), the minimum at
    `total_steps`, after which it stays: a run continued beyond its end never warms up again.
    """
    assert step >= 1, "steps count from 1"
    peak = config.learning_rate
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    decay_steps = max(1, total_steps - max(1, config.warmup_steps))
    progress = min(1.0, (step - max(1, config.warmup_steps)) / decay_steps)
    minimum = peak * config.minimum_learning_rate_ratio
    # `min`: rounding must not lift the rate above the peak.
    return min(peak, minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def clip_factor(global_norm: float, clip_norm: float) -> float:
    """Return the factor of every gradient that bounds the whole model's norm by `clip_norm`.

    SwarmError for a norm that is not finite: it must never reach the parameters.
    """
    if not math.isfinite(global_norm) or global_norm < 0:
        raise SwarmError(
            f"the gradient norm of this step is {global_norm}, a finite number is needed: the "
            "run diverges or a peer sends damaged gradients; lower the learning rate or "
            "continue from an earlier checkpoint"
        )
    return min(1.0, clip_norm / (global_norm + CLIP_EPSILON))
