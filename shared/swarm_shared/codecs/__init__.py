"""Tensor codecs for activations and gradients between stages.

`swarm_shared.run.codec_sizes` names the codecs and gives the encoded size of a tensor without
torch, because the daemon and the coordinator check lengths and compute nothing. `tensors` encodes
and decodes, in the stage worker and in the reference; `boundary` puts a codec into a model that is
not cut.

A run's manifest fixes one codec for all activations and one for all gradients. Each is a pure
function of the tensor, to the bit, on every machine and with any number of threads: what is
recomputed after a peer's death, by a hedged request or in a step close equals what was computed
before (decision 0021).
"""
