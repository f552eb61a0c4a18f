"""From shards to batches: shards, tokenizer, row order, masking, packing, the loader and the digest of the rows it gave."""
