"""Training data: tokenizers, files of token ids, and the sequences that make up a microbatch."""
