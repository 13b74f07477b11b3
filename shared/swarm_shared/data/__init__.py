"""Training data: tokenizers, files of token ids, and which of them a microbatch is made of."""
