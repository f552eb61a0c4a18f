"""Rows a second on one core: our complete loader, a collator alone, and reading one row a sample.

    python benchmarks/bench_data.py [--json FILE] [--rows N]

Ours does everything: order, read, checksum, masking (by token; also shown by word and span) and batches, in one process. The
peers do less: Hugging Face's collator gets rows in memory as lists of a `datasets` loader, with precomputed special-token masks;
webdataset reads and decodes one `.npy` a row without masking. All run alternately in one process for several rounds; p20, p50 and
p80 over the rounds are shown, and ratios are of p50. Ours and the collator are compared only at equal batch sizes, since the cost
of a batch weighs more on small ones. `ratio` is the lowest of single-token masking relative to the collator.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import numpy as np
import torch

from benchmarks.common import hardware
from benchmarks.common.measure import quantiles, take_turns
from megabert.common.environment import disable_malloc_trimming
from megabert.config import MaskingConfig
from megabert.data.loader import Loader
from megabert.data.masking import MaskingVocabulary
from megabert.data.shards import Dataset, write_manifest, write_shard

VOCAB, SLOTS, BLOCK_ROWS = 30_000, 8, 256
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
MICRO, ROUNDS, SECONDS = 32, 7, 0.25
COLLATOR, READER = ("HF DataCollatorForLanguageModeling, collating only", "webdataset, one row a sample, reading only")

# a call, and the rows that it gives
Step = tuple[Callable[[], object], int]


def synthetic(folder: Path, rows: int, seq_len: int) -> tuple[Dataset, MaskingVocabulary]:
    """Rows of one pair (60%) or two (40%), full except for a token, in four shards or more; 70% of the tokens start a word."""
    rng = np.random.default_rng(0)
    row = np.arange(rows)
    ids = rng.integers(len(SPECIAL), VOCAB, (rows, seq_len)).astype(np.uint16)
    bounds = np.zeros((rows, SLOTS, 2), np.uint16)
    isnext = np.full((rows, SLOTS), -1, np.int8)
    two = rng.random(rows) < 0.4
    first = np.where(two, rng.integers(seq_len // 4, seq_len * 3 // 4, rows), seq_len - rng.integers(0, 2, rows))
    second = np.where(two, seq_len - first, 0)
    ids[np.arange(seq_len) >= (first + second)[:, None]] = SPECIAL["pad"]
    for slot, length, start, chosen in ((0, first, 0 * first, row), (1, second, first, np.flatnonzero(two))):
        a = length[chosen] // 2
        ids[chosen, start[chosen]] = SPECIAL["cls"]
        ids[chosen, start[chosen] + a - 1] = ids[chosen, start[chosen] + length[chosen] - 1] = SPECIAL["sep"]
        bounds[chosen, slot] = np.stack([length[chosen], a], axis=1)
        isnext[chosen, slot] = rng.integers(0, 2, len(chosen))
    per_shard = max(BLOCK_ROWS, rows // 4 // BLOCK_ROWS * BLOCK_ROWS)
    shards = []
    for i in range(0, rows, per_shard):
        part = slice(i, i + per_shard)
        path = folder / f"shard-{i // per_shard:06d}.tar"
        shards.append(write_shard(path, i // BLOCK_ROWS, ids[part], bounds[part], isnext[part], block_rows=BLOCK_ROWS))
    tokenizer = {"kind": "sentencepiece", "file": "none.model", "sha256": "0" * 64, "vocab_size": VOCAB}
    tokenizer |= {"special_ids": SPECIAL}
    manifest = {"schema": 1, "order": 2, "seq_len": seq_len, "max_sequences": SLOTS, "rows": rows, "dtype": "uint16"}
    manifest |= {"block_rows": BLOCK_ROWS, "tokenizer": tokenizer, "shards": shards}
    write_manifest(folder, manifest | {"statistics": {}, "options": {}, "held_out": None})
    return Dataset(folder), MaskingVocabulary(np.arange(VOCAB) % 10 < 7, SPECIAL["mask"], SPECIAL.values())


def ours(dataset: Dataset, vocabulary: MaskingVocabulary, global_batch: int, masking: MaskingConfig) -> Step:
    micro = min(MICRO, global_batch)
    loader = Loader(dataset, vocabulary, global_batch=global_batch, micro_batch=micro, seed=1, masking=masking)
    return partial(next, loader), global_batch


def hugging_face(dataset: Dataset, rows: int, size: int) -> Step:
    """`DataCollatorForLanguageModeling` on batches of `size` rows in memory."""
    from benchmarks.peers.hf_plain_loop import collator

    collate = collator(dataset.manifest.vocab_size)
    ids = dataset.read(np.arange(min(max(rows, size), dataset.rows))).ids
    if len(ids) < size:
        raise ValueError(f"the dataset has {len(ids)} rows, fewer than a batch of {size}")
    features = [
        {"input_ids": row, "special_tokens_mask": special}
        for row, special in zip(ids.tolist(), (ids < 5).astype(int).tolist(), strict=True)
    ]
    batches = itertools.cycle([features[i : i + size] for i in range(0, len(features) - size + 1, size)])
    return lambda: collate(next(batches)), size


def one_row_a_sample(dataset: Dataset, rows: int, path: Path) -> Step:
    """Stock webdataset over a tar with one `.npy` of ids a row."""
    import webdataset

    # whole seconds, which need no header of their own
    with webdataset.TarWriter(str(path), mtime=0) as tar:
        for i, row in enumerate(dataset.read(np.arange(min(rows, dataset.rows))).ids):
            tar.write({"__key__": f"{i:09d}", "ids.npy": row})
    stream = iter(webdataset.WebDataset(str(path), shardshuffle=False).decode().repeat())
    return lambda: next(stream)["ids.npy"], 1


def rows_per_second(step: Step) -> float:
    (call, rows), calls, start = step, 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS:
        call()
        calls += 1
    return calls * rows / passed


def measure(dataset: Dataset, vocab: MaskingVocabulary, rows: int, sizes: list[int], scratch: Path) -> dict[str, Any]:
    """All sides at all batch sizes, alternately; comparisons are between equal sizes."""
    cases, equal = dict[str, Step](), list[tuple[str, str]]()  # equal: (ours, peer)
    for size in sizes:
        mine, peer = f"ours, updates of {size} rows", f"{COLLATOR}, batches of {size} rows"
        cases[peer] = hugging_face(dataset, rows, size)
        equal.append((mine, peer))
        cases[mine] = ours(dataset, vocab, size, MaskingConfig(strategy="token"))
        cases[f"by word, updates of {size} rows"] = ours(dataset, vocab, size, MaskingConfig(strategy="word"))
        cases[f"by span, updates of {size} rows"] = ours(dataset, vocab, size, MaskingConfig(strategy="span"))
    cases[READER] = one_row_a_sample(dataset, rows, scratch / "rows.tar")
    equal += [(mine, READER) for mine, _ in equal]
    for call, _ in cases.values():
        call()  # maps, caches, first imports
    rates = take_turns(cases, ROUNDS, lambda name: rows_per_second(cases[name]))
    shown = {name: quantiles(values) for name, values in rates.items()}
    ratios = {(mine, peer): shown[mine]["p50"] / shown[peer]["p50"] for mine, peer in equal}
    return {
        "seq_len": dataset.manifest.seq_len,
        # the lowest of single-token masking, which the collator does, over the collator
        "ratio": min(r for (mine, peer), r in ratios.items() if mine.startswith("ours") and COLLATOR in peer),
        "rows_per_sec": shown,
        "comparisons": [
            {"what": "rows/s", "ours": mine, "peer": peer, "ratio": r} for (mine, peer), r in ratios.items()
        ],
    }


def show(result: dict[str, Any]) -> None:
    print(f"\nrows of {result['seq_len']} tokens; rows/s on one core")
    for name, q in result["rows_per_sec"].items():
        print(f"  {name:<72} p20 {q['p20']:>9,.0f}   p50 {q['p50']:>9,.0f}   p80 {q['p80']:>9,.0f}")
    hardware.print_ratios(result["comparisons"])


def main() -> None:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=32_768, help="rows of the synthetic dataset at 128 tokens")
    add("--global-batch", type=int, nargs="+", default=[32, 2048], help="rows of an update of ours and of a batch")
    args = parser.parse()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    disable_malloc_trimming()  # as in train.py and its loader processes
    print(hardware.describe())
    results = []
    with tempfile.TemporaryDirectory(prefix="bench_data_") as scratch:
        for seq_len in (128, 512):
            (folder := Path(scratch, str(seq_len))).mkdir()
            made = synthetic(folder, max(1024, args.rows * 128 // seq_len), seq_len)
            results.append(measure(*made, 4096, args.global_batch, Path(scratch)))
            show(results[-1])
    ratio = min(result["ratio"] for result in results)
    report = {"benchmark": "data", "unit": "rows/s on one core", "ratio": ratio, "results": results}
    hardware.write_json(args.json, report)


if __name__ == "__main__":
    hardware.run(main)
