"""Documents as the filters and the stages of a build see them, made from plain strings."""

import numpy as np

from data_prep.tokens import encoder


def batch_of(documents):
    """Facts of the words of documents, each a list of paragraphs or one string with line feeds between them."""
    return encoder.word_facts([d.split("\n") if isinstance(d, str) else d for d in documents], folded=True)


def encoded(documents, tokenizer, words=None):
    """Documents, each a list of paragraphs, as an encoder with a cache of `words` (a new one) gives them."""
    words = words or encoder.WordEncoder(tokenizer, np.dtype(np.uint16))
    for document in documents:
        words.add(document)
    return words.finish()
