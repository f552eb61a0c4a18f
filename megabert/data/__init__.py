"""From shards to batches: shards, tokenizer, row order, masking, packing, batches and their loader."""
