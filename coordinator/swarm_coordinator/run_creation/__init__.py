"""`init`: from text to tokenised shards, key and signed manifest."""
