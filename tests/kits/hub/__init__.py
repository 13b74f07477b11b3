"""A Hugging Face hub on this machine."""
