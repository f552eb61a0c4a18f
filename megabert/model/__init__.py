"""BERT and its operations."""

from megabert.model.bert import BertForPreTraining, Output, parameter_count

__all__ = ["BertForPreTraining", "Output", "parameter_count"]
