"""Tokens: the encoder, sentence pairs, packing of sequences into rows."""
