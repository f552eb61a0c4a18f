"""BERT for pre-training, its operations, and the floating-point operations of training it."""

from megabert.model.bert import BertForPreTraining, Output, parameter_count

__all__ = ["BertForPreTraining", "Output", "parameter_count"]
