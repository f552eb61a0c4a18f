"""Fixed features: a trained model's vectors of texts, as in Devlin et al. 2019, section 5.3.

megabert features --model DIR --input lines.txt --output vectors.npy                    a vector a text
megabert features --model DIR --input FILE.tsv --text COLUMN --pool none --output vectors.parquet     a vector a token

DIR is a run folder, one of its checkpoints, or a Hugging Face folder. Vectors are in the order of the input, and are the
same whatever the batches. A file may be larger than memory; after a kill the same command resumes and writes the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megabert.common.arguments import Parser, called_as
from megabert.common.errors import INTERRUPTED, OK, code_of, command
from megabert.common.logs import log

LAYERS = "last, second-to-last, sum-last-4, concat-last-4, sum-all, embeddings, N[,N…]"
POOLS = ("mean", "max", "cls", "sentence", "none")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.commands.features"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, one checkpoint in it, or a Hugging Face folder")
    add(
        "--input",
        required=True,
        metavar="FILE",
        help="a text a line, or with --text a table: .tsv, .csv, .jsonl; also .gz",
    )
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="file to write: .parquet, or .npy for one vector a text; must not exist",
    )
    add("--text", action="append", default=[], metavar="COLUMN", help="column of the text; twice for a pair")
    add("--layers", default="last", help=f"{LAYERS}; 0 is the embeddings, sum-all leaves them out")
    pools = (
        "one vector a text: the mean or the max over all of its tokens, or cls: that of [CLS] (of [SEP] in a causal model); "
        "sentence: as the model's sentence-transformers folder says; none: a vector a token, [CLS] and [SEP] too"
    )
    add("--pool", default="mean", choices=POOLS, help=pools)
    add("--dtype", default="float32", choices=("float32", "float16"), help="of the vectors")
    add("--max-length", type=int, default=0, metavar="N", help="cut longer texts to N tokens; 0: to the model's most")
    precisions = "of the model: bf16 is about twice as fast where the processor has it, and accurate to 2 to 3 digits"
    add("--precision", default="fp32", choices=("fp32", "bf16"), help=precisions)
    batches = "tokens computed at once, on the CPU by each core; on a GPU 4096 (default: 1024)"
    add("--batch-tokens", type=int, metavar="N", help=batches)
    moved = "the run's tokenizer, where its dataset is no longer in its place"
    add("--tokenizer", default="", metavar="FILE", help=moved)
    args = parser.parse_args(argv)
    if len(args.text) > 2:
        raise ValueError(f"--text {args.text[2]}: a pair has two texts, this is a third")
    return args


@command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from megabert.commands.extraction import extract
    from megabert.common.environment import keep_freed_memory
    from megabert.common.streaming import folder_of

    options = {
        "layers": args.layers,
        "max_length": args.max_length,
        "batch_tokens": args.batch_tokens,
        "precision": args.precision,
        "pool": args.pool,
        "dtype": args.dtype,
    }
    keep_freed_memory()
    try:
        result = extract(args.model, args.input, args.output, args.text, args.tokenizer, **options)
    except KeyboardInterrupt:
        kept = folder_of(Path(args.output)).exists()
        log.error(f"interrupted; {'the same command resumes' if kept else 'nothing was written'}")
        return INTERRUPTED
    log.info(f"{args.output}: vectors of {result.texts:,} texts")
    if result.truncated:
        log.warning(f"{result.truncated:,} of them are longer than {result.max_length} tokens and lost their end")
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))
