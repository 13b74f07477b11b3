"""What a tensor becomes between two stages, and what it is afterwards.

`sizes` names the codecs and says how many bytes each makes of so many values: no torch, because
the daemon and the coordinator check lengths and compute nothing. `tensors` encodes and decodes, in
the stage worker and in the reference; `border` puts a codec into a model that is not cut.

A run's manifest fixes one codec for all activations and one for all gradients. Each is a pure
function of the tensor, to the bit, whoever computes it and with however many threads: what is
computed again after a death, a hedge or a close is what was computed before (decision 0021).
"""
