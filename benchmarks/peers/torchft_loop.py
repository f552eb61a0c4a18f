"""A rank of a torchft job: the peer of ranks that restart in place. torchft is not among the project's packages.

    TORCHFT_LIGHTHOUSE=ADDRESS python -m benchmarks.peers.torchft_loop --rank 0 --data DIR --run DIR --steps N

Each rank is a replica group of its own, with torchft's Manager, DistributedDataParallel and Optimizer over gloo. After a rank is
lost the others discard the update they are in and go on without it; a restarted rank takes the state from another. Every committed
update is a line in RUN/rank-N.jsonl: step and number of ranks. The model is transformers' BertForMaskedLM of
preset `tiny` with one layer of 32, as in the kills of our own ranks, and the batch eight rows a rank.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.hf_plain_loop import Sequences, collator, model_of
from benchmarks.survival.life import TINY
from megabert import config as configuration
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer

ROWS = 8
# seconds of a collective whose peer is lost
TIMEOUT = timedelta(seconds=5)


def train(rank: int, data: Path, run: Path, steps: int) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(rank + int(time.time()))  # a restarted rank draws other rows
    dataset = Dataset(data)
    vocabulary = Tokenizer.load(dataset.tokenizer_path).vocab_size
    fixed = [f"model.vocab_size={vocabulary}", "model.nsp=false"]
    size = configuration.load("tiny", [*(word for word in TINY if word.startswith("model.")), *fixed]).model
    rows = DataLoader(Sequences(dataset), ROWS, shuffle=True, drop_last=True, collate_fn=collator(vocabulary))
    model = model_of(size, dropout=0.1)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load(tree: dict[str, Any]) -> None:
        model.load_state_dict(tree["model"])
        adamw.load_state_dict(tree["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"rank_{rank}",
        timeout=TIMEOUT,
        **place,
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    with (run / f"rank-{rank}.jsonl").open("a", buffering=1) as file:
        while True:
            for batch in rows:
                if manager.current_step() >= steps:
                    return
                before = manager.current_step()
                optimizer.zero_grad()
                replicated(**batch).loss.backward()
                optimizer.step()
                if manager.current_step() > before:
                    line = {"step": manager.current_step(), "ranks": manager.num_participants()}
                    file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    train(args.rank, args.data, args.run, args.steps)


if __name__ == "__main__":
    main()
