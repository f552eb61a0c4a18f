"""From shards to batches: shards, tokenizer, row order, masking, batches and their loader."""
