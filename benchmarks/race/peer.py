"""Hugging Face's plain loop as a process of the race: the points of its curve in a folder, weights under our names."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.peers import hf_plain_loop
from benchmarks.race.recipes import overrides_of
from benchmarks.race.training import WEIGHTS
from megabert import config
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.engine.precision import usual
from megabert.hf.mapping import from_huggingface

# what keys of its size begin with
MODEL = "model."


def recipe_of(fields: dict[str, Any]) -> tuple[hf_plain_loop.PeerRecipe, list[str]]:
    """The loop's recipe, and `model.` keys as overrides of the preset. Raises ValueError for a field that neither has."""
    sizes = {name: value for name, value in fields.items() if name.startswith(MODEL)}
    rest = {name: value for name, value in fields.items() if name not in sizes}
    try:
        recipe = hf_plain_loop.PeerRecipe(**rest)
    except TypeError as error:
        raise ValueError(f"recipe of the peer: {error}") from None
    return recipe, overrides_of(sizes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", required=True, type=Path)
    add("--run", required=True, type=Path, help="replaced")
    add("--preset", required=True, help="of ours: the model's size, which model. keys of the recipe change")
    add("--recipe", required=True, type=json.loads, help="JSON of the loop's PeerRecipe, and model. keys")
    add("--points", required=True, type=int, help="of the curve")
    args = parser.parse_args(argv)
    try:
        recipe, sizes = recipe_of(args.recipe)
        tokenizer = Tokenizer.load(Dataset(args.data).tokenizer_path)
        fixed = [f"model.vocab_size={tokenizer.vocab_size}", "model.nsp=false", "model.norm=post"]
        cfg = config.load(args.preset, [*sizes, *fixed])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shutil.rmtree(args.run, ignore_errors=True)
    args.run.mkdir(parents=True)
    before = {"seconds": 0.0, "tokens": 0}
    for point, model in hf_plain_loop.train(args.data, tokenizer, cfg.model, recipe, 1 / args.points):
        theirs = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
        weights = from_huggingface(theirs, cfg.model)
        if not all(torch.isfinite(value).all() for value in weights.values()):
            print(f"error: weights that are not finite at step {point['step']}", file=sys.stderr)
            return 3
        folder = args.run / f"step-{point['step']:08d}"
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS)
        line = {"step": point["step"], "time/train_seconds": point["seconds"], "tokens": point["tokens"]}
        if seconds := point["seconds"] - before["seconds"]:
            line["perf/tokens_per_sec"] = (point["tokens"] - before["tokens"]) / seconds
        before = point
        with (args.run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    (args.run / "finished.json").write_text(
        json.dumps({"config": cfg.model_dump() | {"precision": usual(hf_plain_loop.device())}})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
