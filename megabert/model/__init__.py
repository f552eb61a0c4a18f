"""BERT and its operations."""

from megabert.model.bert import IGNORE, BertForPreTraining, Output, parameter_count

__all__ = ["IGNORE", "BertForPreTraining", "Output", "parameter_count"]
