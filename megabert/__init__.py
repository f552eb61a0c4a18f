"""MegaBERT: BERT pre-training from verified shards to a model anyone can load."""

__version__ = "0.1.0"
