"""Minimal pairs: how often the acceptable one of two sentences is likelier.

megabert pairs --model DIR --pairs blimp/                   BLiMP's .jsonl files; the table by field and paradigm
megabert pairs --model DIR --pairs zorro/ --json FILE       Zorro's .txt files; the same as JSON

DIR is a run folder, one of its checkpoints, or a Hugging Face folder. A masked model scores a sentence by its
pseudo-log-likelihood, a causal one by its likelihood; one trained on both can do either (--score). Ties count half; the BabyLM
challenge's scorer counts them as correct.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megabert.common.arguments import MODEL, TOKENIZER, Parser, refuse_missing, refuse_replacing
from megabert.common.errors import command
from megabert.common.logs import hide_secrets, log
from megabert.hf.hub import model_folder
from megabert.objectives.pairs import read_pairs

PRECISION = "of the model: bf16 is faster where the processor has it, and makes ties"


def as_text(table: dict[str, Any]) -> str:
    """Fields with their paradigms, accuracy in percent."""
    lines = []
    for field, accuracy in table["fields"].items():
        lines.append(f"{100 * accuracy:6.2f}  {field}")
        of_field = ((name, values) for name, values in table["paradigms"].items() if values["field"] == field)
        lines += [f"{100 * values['accuracy']:10.2f}  {name} ({values['pairs']} pairs)" for name, values in of_field]
    ties = f", {table['ties']} of them ties, which count half" if table["ties"] else ""
    mean = f"mean of {len(table['paradigms'])} paradigms ({table['pairs']:,} pairs{ties})"
    return "\n".join([*lines, f"{100 * table['accuracy']:6.2f}  {mean}"])


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    add("--pairs", required=True, metavar="PATH", help=".jsonl or .txt file, or a folder of them")
    add("--each", type=int, default=0, metavar="N", help="the first N pairs of each paradigm; 0: all")
    add("--json", default="", metavar="FILE", help="also write the table to this file")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help=PRECISION)
    likelihood = "the likelihood (default: causal for a causal model, else masked)"
    add("--score", default="", choices=("masked", "causal"), help=likelihood)
    add("--tokenizer", default="", metavar="FILE", help=TOKENIZER)
    args = parser.parse_args(argv)
    if args.each < 0:
        raise ValueError(f"--each {args.each}: must be 0 or more")
    if args.json and not Path(args.json).parent.is_dir():
        raise ValueError(f"{Path(args.json).parent}: no such folder")
    refuse_replacing("--json", args.json)
    refuse_missing(args, "tokenizer")
    folder, pairs = model_folder(args.model), read_pairs(args.pairs, args.each)
    from megabert import hf
    from megabert.common.environment import disable_malloc_trimming
    from megabert.common.files import write_atomically
    from megabert.engine import DTYPES
    from megabert.objectives.minimal_pairs import list_sentences, score_pairs

    disable_malloc_trimming()
    model, started = hf.load(folder, args.tokenizer), time.perf_counter()
    score = args.score or model.config.data.masking.objective
    table = score_pairs(model, pairs, DTYPES[args.precision], score == "causal")
    seconds, sentences = time.perf_counter() - started, len(list_sentences(pairs))
    log.info(f"{sentences:,} sentences in {seconds:.1f} s, {60 * sentences / seconds:,.0f} a minute")
    if args.json:
        text = json.dumps({"model": hide_secrets(args.model), "score": score} | table, indent=1) + "\n"
        write_atomically(Path(args.json), text.encode())
    print(as_text(table))
