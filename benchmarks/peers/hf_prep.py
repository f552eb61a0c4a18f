"""Text to training instances with a fast tokenizer, Hugging Face's or tokie: the peers of `bench_prep.py`.

    RAYON_NUM_THREADS=1 python benchmarks/peers/hf_prep.py tokenizers|tokie VOCAB OUTPUT.npy FILE…

Like transformers' `run_mlm.py`: non-empty lines are tokenized a thousand at a time by WordPiece (`[CLS] line [SEP]`; Hugging Face's
by `encode_batch_fast`, without offsets), concatenated, and cut into instances of 128 tokens. It does less than data_prep: no
sentences, pairs, filters, duplicates, shuffle or checksums, and everything is in memory. Prints as JSON `seconds`, from opening the
first file to the instances on disk, `encode_seconds` of them from lists of texts to lists of ids, and the number of `instances`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import TemplateProcessing

LENGTH = 128  # tokens of an instance
LINES = 1000  # lines of a batch, as in `datasets.map`


def lines(paths: Sequence[str]) -> Iterator[str]:
    """Non-empty lines of text files, without WikiExtractor's tags."""
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if (text := line.strip()) and not text.startswith(("<doc ", "</doc>")):
                    yield text


def encoder(library: str, vocabulary: str) -> Callable[[list[str]], list[list[int]]]:
    """Texts to ids by a library."""
    with open(vocabulary, encoding="utf-8") as file:
        cased = any(token != token.lower() for token in file if not token.startswith("["))
    fast = BertWordPieceTokenizer(vocabulary, lowercase=not cased)._tokenizer
    if library == "tokenizers":
        return lambda texts: [one.ids for one in fast.encode_batch_fast(texts)]
    import tokie

    # of BertProcessing tokie adds no special tokens
    special = [(token, fast.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    fast.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    with tempfile.NamedTemporaryFile(suffix=".json") as saved:
        fast.save(saved.name)
        other = tokie.Tokenizer.from_json(saved.name)
    return lambda texts: [one.ids for one in other.encode_batch(texts)]


def main(library: str, vocabulary: str, output: str, *paths: str) -> None:
    encode = encoder(library, vocabulary)
    instances: list[list[int]] = []
    started, encode_seconds, text = time.perf_counter(), 0.0, lines(paths)
    while batch := list(islice(text, LINES)):
        began = time.perf_counter()
        encoded = encode(batch)
        encode_seconds += time.perf_counter() - began
        ids = list(chain.from_iterable(encoded))
        instances += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    np.save(output, np.array(instances, np.uint16))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "encode_seconds": encode_seconds, "instances": len(instances)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
