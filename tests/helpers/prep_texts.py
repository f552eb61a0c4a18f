"""Documents as the filters and the stages of a build see them, made from plain strings."""

import numpy as np

from data_prep.text import clean
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


def ids_of_build(texts, tokenizer):
    """The ids of each text as a build encodes it."""
    documents = [clean.paragraphs(clean.decode(text.encode())[0], False) for text in texts]
    batch = encoded(documents, tokenizer).encoded
    return [ids.tolist() for ids in np.split(batch.tokens, np.cumsum(batch.document_tokens())[:-1])]
