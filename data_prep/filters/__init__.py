"""Quality rules of documents and of their lines, and filters by a model.

A rule is a function and an entry: a measure of all documents of a batch at once, and its `QualityRule` in the `RULES` of a file.

    # data_prep/filters/long_words.py
    import numpy as np

    from data_prep.filters.measures import DocumentMeasures, QualityRule, compute_share, segment_sums

    def long_words(m: DocumentMeasures) -> np.ndarray:
        return compute_share(segment_sums(m.characters_of > 30, m.documents), m.words)

    RULES = (QualityRule("", "max-long-words", "words of more than 30 characters", long_words, 0.1, share=True),)

A new file has a line `*long_words.RULES` in `RULES` of `data_prep/filters/rules.py`. `--filters max-long-words=0.2`, `--help`, the report
and the totals pick the rule up from there. A `min-` rule drops documents below its limit, a `max-` rule those above it. A
measure reads facts of words (`measures.FACTS`: hash, characters, flags), never text; a new flag is set once for each
distinct word in `measures.describe_words`.
"""
