"""Documents as the filters see them, made from plain strings."""

from data_prep.tokens import encoder


def batch_of(documents):
    """Facts of the words of documents, each a list of paragraphs or one string with line feeds between them."""
    return encoder.word_facts([d.split("\n") if isinstance(d, str) else d for d in documents], folded=True)
