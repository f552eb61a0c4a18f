"""The stages of a build, in their order: train_tokenizer, read, dedup, sequences, shuffle, write."""
