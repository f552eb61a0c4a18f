"""Readers, from input names to documents: files, compression, encodings, formats."""
