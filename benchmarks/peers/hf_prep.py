"""Text to training instances with Hugging Face's fast tokenizer: the peer of `bench_prep.py`.

    RAYON_NUM_THREADS=1 python benchmarks/peers/hf_prep.py VOCAB OUTPUT.npy FILE…      prints {"seconds", "instances"}

Like transformers' `run_mlm.py`: non-empty lines are tokenized a thousand at a time by WordPiece (`[CLS] line [SEP]`; by
`encode_batch_fast`, without offsets), concatenated, and cut into instances of 128 tokens. It does less than data_prep: no
sentences, pairs, filters, duplicates, shuffle or checksums, and everything is in memory. The time is from opening the first file
to the instances on disk.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
from tokenizers import BertWordPieceTokenizer

# tokens of an instance
LENGTH = 128
# lines of a batch, as in `datasets.map`
LINES = 1000


def lines(paths: Sequence[str]) -> Iterator[str]:
    """Non-empty lines of text files, without WikiExtractor's tags."""
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if (text := line.strip()) and not text.startswith(("<doc ", "</doc>")):
                    yield text


def main(vocabulary: str, output: str, *paths: str) -> None:
    with open(vocabulary, encoding="utf-8") as file:
        cased = any(token != token.lower() for token in file if not token.startswith("["))
    tokenizer = BertWordPieceTokenizer(vocabulary, lowercase=not cased)
    started = time.perf_counter()
    instances: list[list[int]] = []
    text = lines(paths)
    while batch := list(islice(text, LINES)):
        ids = list(chain.from_iterable(one.ids for one in tokenizer._tokenizer.encode_batch_fast(batch)))
        instances += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    np.save(output, np.array(instances, np.uint16))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "instances": len(instances)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
