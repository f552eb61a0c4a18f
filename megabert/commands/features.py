"""Fixed features: a trained model's vectors of texts, as in Devlin et al. 2019, section 5.3.

megabert features --model DIR --input lines.txt --output vectors.parquet
megabert features --model DIR --input FILE.tsv --text COLUMN --pool mean --output vectors.npy
megabert features --model DIR --compare crane "A crane stood in the reeds." "The crane lifted the steel."

DIR is a run folder, one of its checkpoints, or a Hugging Face folder. Vectors are in the order of the input, and are the
same whatever the batches. A file may be larger than memory; after a kill the same command resumes and writes the same bytes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabert.common.arguments import Parser, called_as
from megabert.common.errors import INTERRUPTED, OK, code_of, command
from megabert.common.logs import log

LAYERS = "last, second-to-last, sum-last-4, concat-last-4, sum-all, embeddings, N[,N…]"
POOLS = ("none", "cls", "mean", "max", "sentence")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.commands.features"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, one checkpoint in it, or a Hugging Face folder")
    add("--input", metavar="FILE", help="a text a line, or with --text a table: .tsv, .csv, .jsonl; also .gz")
    add("--output", metavar="FILE", help="file to write: .parquet, or .npy for one vector a text; must not exist")
    add("--text", action="append", default=[], metavar="COLUMN", help="column of the text; twice for a pair")
    add("--layers", default="last", help=f"{LAYERS}; 0 is the embeddings, sum-all leaves them out")
    pools = (
        "none: a vector a token, [CLS] and [SEP] too; else one a text: of [CLS] (of [SEP] in a causal model), or mean or max "
        "over all of its tokens; sentence: as the model's sentence-transformers folder says"
    )
    add("--pool", default="none", choices=POOLS, help=pools)
    add("--dtype", default="float32", choices=("float32", "float16"), help="of the vectors")
    add("--max-length", type=int, default=0, metavar="N", help="cut longer texts to N tokens; 0: to the model's most")
    precisions = "of the model: bf16 is about twice as fast where the processor has it, and accurate to 2 to 3 digits"
    add("--precision", default="fp32", choices=("fp32", "bf16"), help=precisions)
    batches = "tokens computed at once, on the CPU by each core; on a GPU 4096 (default: 1024)"
    add("--batch-tokens", type=int, metavar="N", help=batches)
    moved = "the run's tokenizer, where its dataset is no longer in its place"
    add("--tokenizer", default="", metavar="FILE", help=moved)
    add("--compare", metavar="WORD", help="show the cosines between the uses of a word in TEXTs instead")
    add("texts", nargs="*", metavar="TEXT", help="texts that --compare looks at")
    args = parser.parse_args(argv)
    if args.compare and (not args.texts or args.input or args.output or args.text):
        raise ValueError("--compare WORD TEXT…: takes texts, and no --input, --output and --text")
    if not args.compare and (not args.input or not args.output or args.texts):
        raise ValueError("give --input FILE and --output FILE, or --compare WORD TEXT…")
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
    }
    if args.compare:
        print(compare(args.model, args.tokenizer, args.compare, args.texts, **options))
        return OK
    options |= {"pool": args.pool, "dtype": args.dtype}
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


def compare(model: str, tokenizer: str, word: str, texts: Sequence[str], **options: Any) -> str:
    """A table of the cosines between a word's vectors in its contexts, each the mean over the word's tokens.

    Raises ValueError for a text without the word, or one that is too long.
    """
    import numpy as np

    from megabert import hf
    from megabert.commands.extraction import Extractor

    extractor = Extractor(hf.load(model, tokenizer), **options)
    lines, vectors = [], []
    for text in texts:
        spans = [match.span() for match in re.finditer(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
        if not spans:
            raise ValueError(f"--compare {word}: the word is not in {text!r}")
        (part,) = extractor.parts([(text, None)])
        if part.truncated.any():
            raise ValueError(f"--compare: {text!r:.60} has more than {extractor.max_length} tokens")
        ((_, offsets),) = extractor.pretrained.tokenizer.encode_with_offsets([text])
        for start, end in spans:
            of_word = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            # [CLS] stands before the text's tokens
            vector = part.vectors[1 + of_word].mean(0)
            vectors.append(vector / np.linalg.norm(vector))
            lines.append(f"{len(vectors):>3}  {text}")
    cosines = np.stack(vectors) @ np.stack(vectors).T
    lines += ["", f"cosines between the vectors of {word!r} in context (layers: {options['layers']})"]
    lines.append("     " + "".join(f"{i:>7}" for i in range(1, len(vectors) + 1)))
    lines += [f"{i:>3}  " + "".join(f"{value:7.3f}" for value in row) for i, row in enumerate(cosines, 1)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(code_of(main))
