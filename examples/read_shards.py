"""Content of shards: rows, and a masked batch as input of the model.

python examples/read_shards.py data/seq128

The dataset is one written by `python -m data_prep build …`.
"""

from __future__ import annotations

import sys

import numpy as np

from megabert.data.loader import Loader
from megabert.data.masking import IGNORE
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer


def main(folder: str) -> None:
    dataset = Dataset(folder)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    facts = dataset.manifest
    print(f"{facts.rows:,} rows of {facts.seq_len} tokens in {len(facts.shards)} shard(s)")
    print(f"blocks of {facts.block_rows} rows, at most {facts.max_sequences} sequences a row")
    print(f"{facts.vocab_size:,} tokens in {tokenizer.path.name}")

    # Random access: any rows by their ids, verified against their checksums.
    rows = dataset.read(np.array([0]))
    start = 0
    print("\nrow 0 as it is stored, one sequence a line (length, tokens of its A part, whether B follows A)")
    for (length, first_part), follows in zip(rows.bounds[0].tolist(), rows.isnext[0].tolist(), strict=True):
        if length:
            text = tokenizer.decode(rows.ids[0, start : start + length])
            print(f"  {length:4} {first_part:4} {follows:3}   {text[:90]}")
        start += length

    # The same rows in training's order, masked: update 0 of a run with this seed, cut into two micro-batches.
    with_masks = next(Loader(dataset, tokenizer, global_batch=8, micro_batch=4, seed=42))
    batch = with_masks.batches[0]
    print(f"\nmicro-batch 0 of update 0: rows {batch.row_ids.tolist()}")
    for name, tensor in batch.inputs().items():
        print(f"  {name:14} {str(tensor.dtype).removeprefix('torch.'):6} {list(tensor.shape)}")
    print(f"  {batch.tokens} tokens, {batch.sequences} sequences, {batch.predictions} predictions")

    flat = batch.input_ids.flatten()
    print("\nwhat is predicted in its first row (position: what the model sees -> what it shall predict)")
    for position, label in zip(batch.mlm_positions[0].tolist(), batch.mlm_labels[0].tolist(), strict=True):
        if label != IGNORE:
            seen = int(flat[position])
            shown_as = "[MASK]" if seen == tokenizer.mask_id else repr(tokenizer.decode([seen]))
            print(f"  {position:4}: {shown_as} -> {tokenizer.decode([label])!r}")


if __name__ == "__main__":
    main(sys.argv[1])
