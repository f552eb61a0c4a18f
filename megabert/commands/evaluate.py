"""Held-out MLM loss (next-token loss of a causal run) and NSP loss of a model under a fixed mask.

megabert evaluate --model MODEL --data DIR           prints one JSON line
megabert evaluate --model MODEL --data DIR DIR …     the first one's figures, and loss and bits a byte of each
"""

from __future__ import annotations

import json
import sys

from megabert.common.arguments import MODEL, Parser, called_as
from megabert.common.errors import OK, code_of, command
from megabert.common.hub import model_folder


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.evaluate"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    folders = "dataset folders written by data_prep, with held-out splits"
    add("--data", required=True, nargs="+", metavar="DIR", help=folders)
    add("--rows", type=int, default=0, help="most held-out rows; 0: the run's eval.rows")
    args = parser.parse_args(argv)
    if args.rows < 0:
        raise ValueError(f"--rows {args.rows}: must be 0 or more")
    folder = model_folder(args.model)
    from megabert.data.shards import Manifest

    for data in args.data:
        Manifest.load(data)  # wrong values are refused before the slow imports
    from megabert.evaluation import evaluate_run

    print(json.dumps(evaluate_run(folder, args.data, args.rows)))
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))
