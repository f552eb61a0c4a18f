"""Seconds and memory of a training step by row length, ours and transformers' ModernBERT, with equal weights and rows.

    python benchmarks/bench_long.py [--quick] [--lengths 512 … 8192] [--precision fp32 bf16] [--json FILE]

A step is forward and backward of --tokens tokens on the CPU, in full rows of one sequence, of which 15% are predicted, so seconds
are comparable between lengths: they are constant for local layers and grow for global ones. Ours has the modern architecture with
windows of 128 tokens and every third layer global, by native kernels; "all local" and "all global" have the same weights with
windows in every layer and in none. The peer is `ModernBertForMaskedLM` with these weights, exported by `megabert.hf`, once with
sdpa and once with eager attention; it computes logits only at predicted positions, like ours. Weights are in the type of
computation on both sides. Losses and gradient norms of both are asserted to be equal.

Every measurement runs in a separate process. Memory is its peak growth by the model and its steps. Ours keeps freed memory like
`megabert train`; the peer has glibc's defaults, like its users. A case that needs more than --memory-share of the free memory is
shown as "does not fit". Ratios are the peer's over ours, of p50 seconds and of memory, for the faster peer at that length.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks.common import hardware
from benchmarks.common.measure import Memory, quantiles, seconds_of
from megabert import config as configuration
from megabert.common.environment import disable_malloc_trimming, match_in
from megabert.config import Config
from megabert.engine import DTYPES, precision
from megabert.hf import mapping
from megabert.model import BertForPreTraining
from megabert.ops.attention import local_keys

WINDOW = 128
OURS, LOCAL, GLOBAL = "ours", "ours, all local", "ours, all global"
PEERS = {"hf sdpa": "sdpa", "hf eager": "eager"}
SIDES = (OURS, LOCAL, GLOBAL, *PEERS)
EQUAL = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-2)}  # relative tolerances of loss and gradient norm
MASK = 4


def make_config(length: int, rows: int) -> Config:
    """Six layers of 256 in the modern architecture."""
    return configuration.from_dict(
        {
            "model": {
                "kind": "modern", "norm": "pre", "nsp": False, "bias": False, "layers": 6, "hidden": 256, "heads": 4,
                "vocab_size": 8192, "dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-5, "init_std": 0.05,
                "max_positions": length, "window": WINDOW, "global_every": 3,
            },
            "batch": {"micro_size": rows, "global_size": rows},
        }
    )  # fmt: skip


def full_rows(cfg: Config) -> dict[str, torch.Tensor]:
    """The model's inputs: random ids, with a mask in every prediction slot."""
    rows, length = cfg.batch.micro_size, cfg.model.max_positions
    slots = cfg.data.masking.capacity(length)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(MASK + 1, cfg.model.vocab_size, (rows * length,), generator=draw)
    chosen = torch.stack([torch.randperm(length, generator=draw)[:slots].sort().values for _ in range(rows)])
    positions = chosen + torch.arange(rows)[:, None] * length  # (B, K), flat
    masked = ids.index_fill(0, positions.flatten(), MASK).view(rows, length)
    places = torch.arange(length, dtype=torch.int32).expand(rows, length).contiguous()
    zeros = torch.zeros_like(places)
    bounds = {"key_start": zeros, "key_end": zeros + length, "lengths": zeros[:, :1] + length}
    heads = {"cls_positions": positions[:, :1].int(), "nsp_labels": torch.full((rows, 1), -100)}
    predicted = {"mlm_positions": positions.int(), "mlm_labels": ids[positions]}
    tokens = {"input_ids": masked.int(), "segment_ids": zeros, "position_ids": places}
    return tokens | bounds | heads | predicted


def peer_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same rows as inputs of transformers."""
    ids = inputs["input_ids"].long()
    labels = torch.full((ids.numel(),), -100)
    labels[inputs["mlm_positions"].flatten().long()] = inputs["mlm_labels"].flatten()
    return {"input_ids": ids, "labels": labels.view_as(ids)}


def measure(side: str, kind: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, memory, loss and gradient norm, in a process that has computed nothing before."""
    torch.set_num_threads(args.threads)
    free = 1024 * int(match_in("/proc/meminfo", r"MemAvailable:\s*(\d+)"))
    resource.setrlimit(resource.RLIMIT_DATA, (round(args.memory_share * free),) * 2)
    memory = Memory(torch.device("cpu"))
    if side not in PEERS:
        disable_malloc_trimming()
    cfg, dtype = make_config(length, args.tokens // length), DTYPES[kind]
    inputs = full_rows(cfg)
    before = memory.now()
    memory.restart()
    torch.manual_seed(0)
    model_cfg = cfg.model if side in (OURS, *PEERS) else configuration.replace(cfg.model, "window", 0)
    model: torch.nn.Module = BertForPreTraining(model_cfg, cfg.ops, "cpu", dtype).train()
    if side == LOCAL:
        inputs["key_start"], inputs["key_end"] = local_keys(inputs["key_start"], inputs["key_end"], WINDOW)
    if side in PEERS:
        fields = mapping.to_huggingface_config(cfg.model) | {"sparse_prediction": True}
        peer = ModernBertForMaskedLM._from_config(ModernBertConfig(**fields), attn_implementation=PEERS[side])
        peer.load_state_dict(mapping.to_huggingface(model.state_dict(), cfg.model))
        model, inputs = peer.train(), peer_inputs(inputs)
    model.to(dtype)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        output = model(**inputs)
        loss = output.loss if side in PEERS else output.mlm_loss_sum / (inputs["mlm_labels"] >= 0).sum()
        loss.backward()
        return float(loss.detach())

    try:
        loss = step()  # not timed: memory is allocated, kernels are chosen
        seconds: list[float] = []
        while len(seconds) < args.repeats or sum(seconds) < args.seconds:
            seconds.append(seconds_of(step, memory.device))
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" in str(error) or isinstance(error, MemoryError):
            return {"seconds": None}
        raise
    gradients = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None])
    return {
        "seconds": quantiles(seconds), "repeats": len(seconds),
        "microseconds_per_token": quantiles(seconds)["p50"] / args.tokens * 1e6,
        "memory_peak_gib": (memory.peak() - before) / 2**30,
        "loss": loss, "gradient_norm": float(gradients.sum().sqrt()),
    }  # fmt: skip


def in_child(*case: Any) -> dict[str, Any]:
    """`measure` in a process forked from this one, which must not have used several threads before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, *case).result()


def check_equal(kind: str, by_side: dict[str, dict[str, Any]]) -> None:
    """Assert that loss and gradient norm of the peers equal ours, where both fit."""
    for name, tolerance in zip(("loss", "gradient_norm"), EQUAL[kind], strict=True):
        for peer in PEERS:
            if by_side[peer]["seconds"] and by_side[OURS]["seconds"]:
                ours, theirs = by_side[OURS][name], by_side[peer][name]
                assert math.isclose(ours, theirs, rel_tol=tolerance), f"{kind} {name}: ours {ours}, {peer} {theirs}"


def compare(what: str, by_side: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of seconds and of memory against the faster peer; none where a side does not fit."""
    best = min((p for p in PEERS if by_side[p]["seconds"]), key=lambda p: by_side[p]["seconds"]["p50"], default=None)
    if best is None or not by_side[OURS]["seconds"]:
        return []
    ours, theirs = by_side[OURS], by_side[best]
    ratios = {"seconds": theirs["seconds"]["p50"] / ours["seconds"]["p50"]}
    ratios["peak memory"] = theirs["memory_peak_gib"] / ours["memory_peak_gib"]
    return [{"what": f"{n}, {what}", "ours": OURS, "peer": best, "ratio": ratio} for n, ratio in ratios.items()]


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['precision']}, {result['tokens'] // result['length']} rows of {result['length']} tokens")
    shown = {"microseconds_per_token": ".1f", "memory_peak_gib": ".2f", "loss": ".5f", "gradient_norm": ".4f"}
    head, rows = ("side", "p20 s", "p50 s", "p80 s", "us/token", "memory, GiB", "loss", "gradient"), []
    for side, r in result["results"].items():
        seconds = [f"{s:.3f}" for s in (r["seconds"] or {}).values()] or ["does not fit"]
        rows.append([side, *seconds, *(format(r[name], form) for name, form in shown.items() if name in r)])
    print(hardware.markdown(head, rows), flush=True)
    hardware.print_ratios(result["comparisons"])


def main() -> None:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    usual = ["fp32"] + ["bf16"] * (precision.usual(torch.device("cpu")) == "bf16")
    add("--quick", action="store_true", help="two short lengths, one step each")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="T", help="tokens of a row")
    add("--tokens", type=int, default=8192, help="tokens of a step; a multiple of each length")
    add("--precision", nargs="+", choices=["fp32", "bf16"], default=usual, help="default: %(default)s on this machine")
    add("--threads", type=int, default=2)
    add("--repeats", type=int, default=3, help="least number of steps of a measurement")
    add("--seconds", type=float, default=2.0, help="least seconds of all steps of a measurement")
    add("--memory-share", type=float, default=0.7, metavar="X", help="largest share of free memory for a measurement")
    args = parser.parse()
    if args.quick:
        args.lengths, args.tokens, args.repeats, args.seconds = [128, 256], 256, 1, 0.0
    for length in args.lengths:
        if length < 1 or args.tokens % length:
            parser.error(f"--lengths {length} does not divide --tokens {args.tokens}")
    print(hardware.describe(), flush=True)
    results = []
    for kind in args.precision:
        for length in args.lengths:
            by_side = {side: in_child(side, kind, length, args) for side in SIDES}
            check_equal(kind, by_side)
            comparisons = compare(f"{kind}, rows of {length}", by_side)
            result = {"precision": kind, "length": length, "tokens": args.tokens, "threads": args.threads}
            results.append(result | {"results": by_side, "comparisons": comparisons})
            show(results[-1])
    hardware.write_json(args.json, {"benchmark": "long", "unit": "seconds of a step", "results": results})


if __name__ == "__main__":
    hardware.run(main)
