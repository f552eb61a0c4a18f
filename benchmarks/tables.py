"""Tables of docs/measurements.md and README.md, written from the result files in benchmarks/results.

    python benchmarks/tables.py [PAGE …]    rewrites the blocks `<!-- table: NAME -->` … `<!-- end -->`
    python benchmarks/tables.py --check     writes nothing, exits 1 and names each block that differs

Tables are the data below: labels, result files and paths to their figures. Only the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common.hardware import ROOT, markdown, over_seeds, show
from benchmarks.race import records

PAGES = ("docs/measurements.md", "README.md")
BLOCK = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?(?=<!-- end -->)", re.S)


class Results:
    """Result files of a checkout; `read` has those that were used, in that order."""

    def __init__(self, root: Path) -> None:
        self.folder, self.read = root / "benchmarks/results", dict[str, Any]()

    def __call__(self, file: str, path: str = "") -> Any:
        """A file's content, or what is at keys and indexes with "/" between them."""
        if file not in self.read:
            self.read[file] = json.loads((self.folder / f"{file}.json").read_text())
        value = self.read[file]
        for key in filter(None, path.split("/")):
            value = value[int(key) if isinstance(value, list) else key]
        return value


@dataclass(frozen=True)
class Pair:
    """Our figure and a peer's, at a path where "*" is the name of the side, or computed from the file. The ratio is the file's, or
    the quotient that is above 1 if ours is better."""

    file: str
    path: str
    ours: str | Callable[[Any], Any]
    peer: str | Callable[[Any], Any]
    form: str = ",.0f"
    ratio: str = ""
    better: str = "more"
    scale: float = 1.0

    def cells(self, results: Results) -> tuple[str, str, str]:
        """Ours, the peer's and their ratio; no ratio if neither more nor less is better."""
        ours, peer = (
            side(results(self.file)) if callable(side) else results(self.file, self.path.replace("*", side))
            for side in (self.ours, self.peer)
        )
        a, b = (value["mean"] if isinstance(value, dict) else value for value in (ours, peer))
        ratio = results(self.file, self.ratio) if self.ratio else a / b if self.better == "more" else b / a
        shown = (show(value, self.form, self.scale) for value in (ours, peer))
        return next(shown), next(shown), f"{ratio:.3g}" if self.better else ""


def seeds(speedrun: Any, track: str, recipe: str) -> dict[str, Any]:
    """Runs of an entry of the race by seed."""
    found = (entry["seeds"] for entry in speedrun["entries"] if (entry["track"], entry["recipe"]) == (track, recipe))
    if (runs := next(found, None)) is None:
        raise ValueError(f"speedrun.json: no entry {track}/{recipe}")
    return runs


def minutes(track: str, recipe: str, speedrun: Any) -> float:
    """Minutes of the longest run of an entry."""
    return max(run["seconds"] for run in seeds(speedrun, track, recipe).values()) / 60


def reached(curve: Sequence[Mapping[str, float]], bits: float) -> float:
    """Minutes at which a curve first reaches these bits a byte, interpolated linearly."""
    if (seconds := records.reached(curve, bits, "seconds")) is None:
        raise ValueError(f"a curve ends at {curve[-1]['bits']} bits a byte, above {bits}")
    return seconds / 60


# entries of the races against the fair peer: its own, and ours; the less favourable one first
RACES = (
    (("30min-2cores", "hf-modern-8000"), ("10min-2cores", "modern-128-8000")),
    (("20min-1cores", "hf-modern-8000"), ("4min-1cores", "modern-128-8000")),
)


def minutes_to_modern(peer: Sequence[str], own: Sequence[str], speedrun: Any) -> dict[str, float]:
    """Minutes until the last bits a byte of the curve of the peer's best seed."""
    best = min(run["curve"][-1]["bits"] for run in seeds(speedrun, *peer).values())
    return over_seeds([reached(run["curve"], best) for run in seeds(speedrun, *own).values()])


STEPS = [Pair(f"step_base{name}", "results/0/results/*/real_tokens_per_sec/p50", "ours", "hf BertForPreTraining",
    ratio="results/0/comparisons/0/ratio") for name in
    ("128_cpu2_2026-11-20", "128_rows32_cpu2_2026-11-22", "128_fp32_cpu2_2026-11-24", "512_cpu2_2026-11-22")]  # fmt: skip
MODERN = [Pair("speedrun", "", partial(minutes_to_modern, peer, own), partial(minutes, *peer), ".1f", better="less")
    for peer, own in RACES]  # fmt: skip
LONG = [Pair("long_cpu2_2026-11-26", f"results/{n}/results/*/microseconds_per_token", "ours", "hf sdpa",
    ratio=f"results/{n}/comparisons/0/ratio") for n in (0, 4, 5, 9)]  # fmt: skip
ATTENTION = [Pair("ops_cpu2_2026-11-20", f"results/{n}/seconds/*/p50", "native", "sdpa", ratio=f"results/{n}/comparisons/1/ratio",
    scale=1e3) for n in (3, 4)]  # fmt: skip
LOADER = [Pair("data_cpu2_2026-11-22", f"results/0/rows_per_sec/* of {rows} rows/p50", "ours, token, updates",
    "HF DataCollatorForLanguageModeling, collating only, batches", ratio=f"results/0/comparisons/{n}/ratio")
    for rows, n in ((32, 0), (2048, 3))]  # fmt: skip
SHARDS = [Pair("prep_cpu2_2026-11-29", f"comparisons/{n}/*", "ours", "peer", ".1f", f"comparisons/{n}/ratio")
    for n in (0, 1)]  # fmt: skip
STORE = [Pair("store_cpu2_2026-11-29", f"sides/*/rows_per_sec/{epoch}", "the store, a cache of all of it", "a local folder")
    for epoch in (0, 1, 2)]  # fmt: skip
VECTORS, LABELS = ([Pair("predict_cpu2_2026-11-22", f"shapes/base/{texts}/{what}/*/texts_per_second", "fp32", peer, ".1f",
    f"shapes/base/{texts}/{what}/fp32/ratio") for texts in ("long", "mixed")]
    for what, peer in (("vectors", "sentence-transformers"), ("labels", "pipeline")))  # fmt: skip
SAVE = [Pair("checkpoint_cpu2_2026-11-22", f"results/*/{what}", "ours", "torch.distributed.checkpoint", ".2f", better="less")
    for what in ("blocked", "committed")]  # fmt: skip
NEXT = "seconds_to_next_update"
KILLED = [Pair("survival_recovery_cpu2_2026-11-29", "recovery/*/median", f"in_place/{NEXT}", peer, ".2f", better="less")
    for peer in (f"torchft/{NEXT}", "torchft/seconds_to_update_of_all_ranks", f"torchrun/{NEXT}")]  # fmt: skip
TASKS = {"SST-2": ("sst2", "accuracy"), "WNUT-17": ("wnut17", "f1"), "RTE": ("rte", "accuracy")}
FINETUNED = {(task, model): [
        Pair(f"finetune_trainer_{file}_cpu2_2026-11-29", f"tasks/{task}/rows/{model}*/{what}", "", ", Trainer", form, "", better, scale)
        for what, form, better, scale in ((f"scores/{metric}", ".1f", "", 100), ("seconds/mean", ",.0f", "less", 1))]
    for task, (file, metric) in TASKS.items() for model in ("modern", "bert")}  # fmt: skip

Row = tuple[str, str, Sequence[Pair]]  # label, peer, pairs whose figures share a cell
README: Sequence[Row] = (
    ("minutes to the lowest held-out loss of three tuned ModernBERTs: 30 minutes of two cores; 20 of one",
        "Hugging Face", MODERN),
    ("tokens/s of BERT-BASE's step, length 128: bf16, AVX-512; fp32, AVX2", "Hugging Face", STEPS[:3:2]),
    ("rows/s of the loader, masking included, one core: batches of 32; 2,048", "Hugging Face's collator", LOADER),
    ("MB/s from text to shards, one core, one WordPiece vocabulary", "`tokenizers`; `tokie`", SHARDS),
    ("fine-tuning BERT-Mini on WNUT-17, the worst of three tasks: seconds; F1, %", "Hugging Face's Trainer",
        FINETUNED["WNUT-17", "bert"][::-1]),
)  # fmt: skip
PEERS: Sequence[Row] = (
    ("minutes to the lowest held-out loss of three tuned ModernBERTs: two cores; one", "Hugging Face", MODERN),
    ("tokens/s of BERT-BASE's step, length 128: bf16; AMX; fp32; length 512: AMX", "Hugging Face", STEPS),
    ("µs/token, rows of 512; 8,192: fp32; bf16 with AMX", "ModernBERT, sdpa", LONG),
    ("ms of attention, packed rows of 512: dropout 0.1; none", "torch SDPA, mask", ATTENTION),
    ("rows/s of the loader, one core, batches of 32; 2,048", "Hugging Face's collator", LOADER),
    ("MB/s from text to shards, one core", "`tokenizers`; `tokie` 0.1.4", SHARDS),
    ("rows/s of the loader from a bucket, 50 MB/s and 100 ms a request, epochs 1 to 3", "ours, a local folder", STORE),
    ("texts/s, vectors of 512 tokens; mixed", "sentence-transformers", VECTORS),
    ("texts/s, labels of 512 tokens; mixed", "transformers' pipeline", LABELS),
    ("seconds of a save: blocking; until committed", "torch's DCP", SAVE),
    ("seconds from a kill to the next update", "torchft: one rank; both; torchrun", KILLED),
)  # fmt: skip
TRAINERS = [(f"{task}, {model}", "", pairs) for (task, model), pairs in FINETUNED.items() if task != "RTE"]
RUNS = (("1.8min-2cores", "muon-128"), ("3min-2cores", "modern-128-rows-16"), ("3min-2cores", "modern-128-8000"),
    ("5min-2cores", "modern-128-8000"), ("9min-2cores", "modern-128-8000"), *(entry for race in RACES for entry in reversed(race)),
    ("30min-2cores", "modern-192-init"), ("120min-2cores", "hf-tuned"), ("20min-1cores", "modern-128"),
    ("20min-1cores", "hf-modern"))  # fmt: skip
TRIALS = "trials_modern-128-8000_cpu1_2026-11-30"
OURS, FP32, BY = "muon-128", "muon-128, precision=fp32", "objectives_{}_cpu1_2026-11-28"
MASKED = f"{BY.format('masked_bell')}/masked"
CHANGES = (  # label, entry of the race or FILE/OBJECTIVE, the same without the change, remark
    ("`model.kind=bert`", f"{FP32} model.kind=bert", FP32, ""),
    ("`objective.causal_share=0`", f"{FP32} objective.causal_share=0.0", FP32, ""),
    ("`optimizer.name=adamw`", f"{FP32} optimizer.name=adamw optimizer.lr=0.0015", FP32, ""),
    ("`schedule.name=linear`", f"{FP32} schedule.name=linear", FP32, ""),
    ("`data.masking.rate=0.15`", f"{FP32} data.masking.rate=0.15 data.masking.final_rate=0.0", FP32, ""),
    ("30% masked throughout", f"{FP32} data.masking.final_rate=0.0", FP32, "fall removed"),
    ("`model.frequency_bias=true`", f"{OURS}, model.frequency_bias=true", OURS, ""),
    ("`model.zero_init=true`", f"{OURS}, model.zero_init=true", OURS, ""),
    ("z-loss of 1e-4", f"{OURS}, objective.z_loss=0.0001", OURS, "removed"),
    ("mean of the last weights", f"{OURS}, average.share=0.1", OURS, "removed"),
    ("decay by 1 - sqrt", f"{OURS}, schedule.name=wsd_sqrt", OURS, "kept for ModernBERT"),
    ("`model.tied=false`", f"{OURS}, model.tied=false", OURS, "kept for published models"),
    ("squared ReLU", f"{FP32} model.kind=bert model.activation=relu2", f"{FP32} model.kind=bert", "removed"),
    ("rate by row, bell-shaped", f"{BY.format('masked_bell')}/bell", MASKED, "not added"),
    ("masks where mispredicted", f"{BY.format('adaptive')}/adaptive", MASKED, "not added"),
    ("one of 16 rows causal", f"{BY.format('replaced_mixed')}/mixed", MASKED, "not added"),
)  # fmt: skip
Cells = Iterator[Sequence[str]]  # of the head first


def compared(rows: Sequence[Row], results: Results, third: str = "peer", peers: str = "which") -> Cells:
    yield "", "MegaBERT", third, *filter(None, [peers]), "ratio"
    for label, peer, pairs in rows:
        ours, theirs, ratios = zip(*(pair.cells(results) for pair in pairs), strict=True)
        yield label, "; ".join(ours), "; ".join(theirs), *filter(None, [peer]), "; ".join(filter(None, ratios))


def race(results: Results) -> Cells:
    yield "budget", "recipe", "tokens", "held-out loss", "accuracy, %", "bits a byte"
    for track, recipe in RUNS:
        runs = seeds(results("speedrun"), track, recipe).values()
        mean = {key: over_seeds([run[key] for run in runs]) for key in ("tokens", "loss", "accuracy", "bits")}
        scores = show(mean["loss"], ".3f"), show(mean["accuracy"], ".1f", 100), f"{mean['bits']['mean']:.3f}"
        yield track, f"`{recipe}`", f"{mean['tokens']['mean'] / 1e6:.1f} M", *scores


def losses(results: Results, entry: str) -> dict[Any, float]:
    """Held-out losses by seed."""
    if "/" not in entry:
        return {seed: run["loss"] for seed, run in seeds(results("speedrun"), "2m-tokens", entry).items()}
    file, objective = entry.split("/")
    return {row["seed"]: row["held_out"]["loss"] for row in results(file, "rows") if row["objective"] == objective}


def changes(results: Results) -> Cells:
    yield "change", "gain", ""
    for label, entry, base, remark in CHANGES:
        new, old = losses(results, entry), losses(results, base)
        yield label, show(over_seeds([old[seed] - new[seed] for seed in new]), "+.3f"), remark


def trials(results: Results) -> Cells:
    """Changes of the race's recipe of three minutes of one core, by the mean of their differences to it with equal seeds."""
    yield "change", "bits a byte", "difference", "tokens"
    rows = results(TRIALS, "rows")
    (base,) = (row["seeds"] for row in rows if not row["change"])
    lines = []
    for row in rows:
        runs = row["seeds"]
        bits, tokens = (statistics.fmean(run[name] for run in runs.values()) for name in ("bits", "tokens"))
        change = over_seeds([run["bits"] - base[seed]["bits"] for seed, run in runs.items()])
        lines.append((bits, (row["change"] or "none", f"{bits:.3f}", show(change, "+.3f"), f"{tokens / 1e6:.1f} M")))
    yield from (cells for _, cells in sorted(lines))


TABLES: dict[str, Callable[[Results], Cells]] = {
    "readme": partial(compared, README), "peers": partial(compared, PEERS),
    "trainer": partial(compared, TRAINERS, third="the Trainer", peers=""),
    "race": race, "changes": changes, "trials": trials,
}  # fmt: skip


def table(name: str, root: Path = ROOT) -> str:
    """The lines of a table, and its result files; README's are those of the measurements. Raises ValueError for an unknown name."""
    if name not in TABLES:
        raise ValueError(f"table {name}: one of {', '.join(TABLES)}")
    results = Results(root)
    head, *rows = TABLES[name](results)
    made = re.sub(" +", " ", markdown(head, rows))  # cells may be empty
    if name == "readme":
        return made
    sources = "Results: " + ", ".join(f"`{file}.json`" for file in results.read)
    return "\n".join([made, "", *textwrap.wrap(sources, 140)])


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help=f"default: {' '.join(PAGES)}")
    parser.add_argument("--check", action="store_true")
    args, code = parser.parse_args(argv), 0
    for page in args.pages:
        try:
            text = (root / page).read_text()
            made = BLOCK.sub(lambda match: f"{match[1]} -->\n{table(match[1], root)}\n", text)
        except (ValueError, OSError) as error:
            parser.error(f"{page}: {error}")
        for old, new in zip(BLOCK.finditer(text), BLOCK.finditer(made), strict=True):
            if args.check and old[0] != new[0]:
                print(f"{page}: table {old[1]} is not what the results give; run python benchmarks/tables.py")
                code = 1
        if not args.check:
            (root / page).write_text(made)
    return code


if __name__ == "__main__":
    sys.exit(main())
