"""Text to training instances with Hugging Face's `datasets`: a peer of `bench_prep_peers.py`.

    python benchmarks/peers/datasets_prep.py VOCAB FOLDER PROCESSES FILE…      prints {"seconds", "tokens"}

What transformers' `run_mlm.py` does without `--line_by_line`: `load_dataset("text")`, `map` with the fast BERT tokenizer in
`PROCESSES` processes, `map` again that concatenates and cuts instances of 128 tokens, left as Arrow files in `FOLDER`. It
does less than data_prep: no sentences, pairs, filters, duplicates, shuffle over files or checksums.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
from transformers import BertTokenizerFast

LENGTH = 128  # tokens of an instance


def main(vocabulary: str, folder: str, processes: str, *paths: str) -> None:
    datasets.disable_progress_bars()
    workers = int(processes)
    tokenizer = BertTokenizerFast(vocab_file=vocabulary, model_max_length=10**9)

    def encode(batch: dict[str, list[str]]) -> Any:
        texts = [text for text in batch["text"] if text.strip() and not text.startswith(("<doc ", "</doc>"))]
        return tokenizer(texts, return_special_tokens_mask=True)

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(chain.from_iterable(lists)) for name, lists in batch.items()}
        whole = len(joined["input_ids"]) // LENGTH * LENGTH
        return {name: [ids[i : i + LENGTH] for i in range(0, whole, LENGTH)] for name, ids in joined.items()}

    started = time.perf_counter()
    text = datasets.load_dataset("text", data_files=list(paths), split="train", cache_dir=folder)
    encoded = text.map(encode, batched=True, num_proc=workers, remove_columns=["text"])
    rows = encoded.map(cut, batched=True, num_proc=workers)
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "tokens": len(rows) * LENGTH}))


if __name__ == "__main__":
    main(*sys.argv[1:])
