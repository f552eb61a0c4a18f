"""Fixed features: a trained model's vectors of texts, as in Devlin et al. 2019, section 5.3.

megabert features --model MODEL --input lines.txt --output vectors.npy                    a vector a text
megabert features --model MODEL --input FILE.tsv --text COLUMN --pool none --output vectors.parquet     a vector a token

Vectors are in the order of the input and do not depend on the batches. A file may be larger than memory; the output is complete or
absent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megabert.common.arguments import LAYERS, MODEL, TOKENIZER, Parser, parse_layers, refuse_missing, refuse_replacing
from megabert.common.errors import command
from megabert.hf.hub import model_folder

POOLS = ("mean", "max", "cls")  # vectors of a text from those of its tokens
POOLING = (
    "one vector a text: mean or max of all tokens', or cls, in a causal model that of [SEP]; none: a vector a token"
)
PRECISIONS = "of the model: bf16 is about twice as fast where the processor has it, and accurate to 2 to 3 digits"
ENDINGS = (".parquet", ".npy")
BATCHES = "tokens computed at once, on the CPU by each core; on a GPU 4096 (default: 1024)"


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that are wrong for any model and texts."""
    from megabert.common import tables

    path, target = Path(args.input), Path(args.output)
    refuse_missing(args, "tokenizer")
    if not path.is_file():
        raise ValueError(f"--input {path}: no such file")
    if bool(args.text) != (Path(path.name.removesuffix(".gz")).suffix in tables.ENDINGS):
        raise ValueError(f"{path}: --text names the column of a .tsv, .csv or .jsonl (also .gz), and of no other file")
    if target.suffix not in ENDINGS:
        raise ValueError(f"{target}: must end in {', '.join(ENDINGS)}")
    if target.suffix == ".npy" and args.pool == "none":
        raise ValueError(f"{target}: .npy holds one vector a text; for --pool none write .parquet")
    refuse_replacing("--output", args.output)
    if not target.parent.is_dir():
        raise ValueError(f"{target.parent}: no such folder")
    if args.max_length < 0:
        raise ValueError(f"--max-length {args.max_length}: must be 0 or more")
    if args.batch_tokens is not None and args.batch_tokens < 1:
        raise ValueError(f"--batch-tokens {args.batch_tokens}: must be 1 or more")
    parse_layers(args.layers)


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    texts = "a text a line, or with --text a table: .tsv, .csv, .jsonl; also .gz"
    add("--input", required=True, metavar="FILE", help=texts)
    vectors = "file to write: .parquet, or .npy for one vector a text; must not exist"
    add("--output", required=True, metavar="FILE", help=vectors)
    add("--text", default="", metavar="COLUMN", help="column of the text")
    add("--layers", default="last", help=LAYERS)
    add("--pool", default="mean", choices=(*POOLS, "none"), help=POOLING)
    add("--max-length", type=int, default=0, metavar="N", help="cut longer texts to N tokens; 0: the model's positions")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help=PRECISIONS)
    add("--batch-tokens", type=int, metavar="N", help=BATCHES)
    add("--tokenizer", default="", metavar="FILE", help=TOKENIZER)
    args = parser.parse_args(argv)
    check(args)
    args.model = model_folder(args.model)
    from megabert.commands.extraction import extract
    from megabert.common.environment import disable_malloc_trimming

    disable_malloc_trimming()
    extract(**vars(args))
