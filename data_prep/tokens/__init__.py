"""Tokens of documents: the encoder and its word cache."""
