"""Text to a file of token ids with datatrove's own pipeline: a peer of `bench_prep_peers.py`.

    python benchmarks/peers/datatrove_prep.py VOCAB FOLDER PROCESSES FILE…      prints {"seconds", "tokens"}

Its LocalPipelineExecutor with one task a process: documents are read from every n-th file, encoded by its
DocumentTokenizer with the same WordPiece vocabulary, shuffled within the task and written with an index, as its examples do
for pre-training. It does less than data_prep: no sentences, pairs, rows, filters, duplicates or checksums.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import BertWordPieceTokenizer

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel


class Reader:
    """Documents of text files: between WikiExtractor's tags where there are any, else a whole file."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths

    def __call__(self, _: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for path in self.paths[rank::world_size]:
            lines: list[str] = []
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith(("<doc ", "</doc>")):
                        if lines:
                            yield Document(text="".join(lines), id=path)
                        lines = []
                    else:
                        lines.append(line)
            if lines:
                yield Document(text="".join(lines), id=path)


def main(vocabulary: str, folder: str, processes: str, *paths: str) -> None:
    out, workers = Path(folder), int(processes)
    with open(vocabulary, encoding="utf-8") as file:
        cased = any(piece != piece.lower() for piece in file if not piece.startswith("["))
    out.mkdir(parents=True)
    BertWordPieceTokenizer(vocabulary, lowercase=not cased).save(str(out / "tokenizer.json"))
    steps = [Reader(paths), DocumentTokenizer(str(out / "tokens"), str(out / "tokenizer.json"), seed=1)]
    started = time.perf_counter()
    executor = LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=str(out / "logs"))
    executor.run()
    seconds = time.perf_counter() - started
    tokens = sum(path.stat().st_size for path in (out / "tokens").glob("*.ds")) // 2  # two bytes each
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
