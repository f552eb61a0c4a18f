"""Fixed features: a trained model's vectors of texts, as in Devlin et al. 2019, section 5.3.

megabert features --model DIR --input lines.txt --output vectors.npz
megabert features --model DIR --input FILE.tsv --text COLUMN --pool mean --output vectors.parquet
megabert features --model DIR --compare crane "A crane stood in the reeds." "The crane lifted the steel."

DIR is a run folder, one of its checkpoints, or a Hugging Face folder. Vectors are in the order of the input, and are the
same whatever the batches. A file may be larger than memory; after a kill the same command goes on where it was, and writes
the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megabert import hf as pretrained
from megabert.commands.features import writers
from megabert.commands.features.compare import comparison, uses_of
from megabert.commands.features.extraction import LAYERS, POOLS, PRECISIONS, SENTENCE, Extractor
from megabert.commands.features.texts import texts_of
from megabert.commands.features.writers import Form
from megabert.common.arguments import Parser, called_as
from megabert.common.atomic_io import sha256_of
from megabert.common.errors import INTERRUPTED, OK, code_of, command
from megabert.common.logs import log
from megabert.common.malloc import keep_freed_memory
from megabert.common.spool import folder_of
from megabert.hf import sentence_folder


@dataclass(frozen=True)
class Done:
    texts: int
    truncated: int
    max_length: int


def extract(
    source: str, input: str, output: str, columns: Sequence[str] = (), tokenizer: str = "", **options: Any
) -> Done:
    """Write the vectors of the texts in `input`; `options` are Extractor's. Raises ValueError or OSError naming the
    mistake, before anything is computed where it can be known; `output` is there only when all went well. The same call goes
    on where one that was killed had come."""
    path, target = Path(input), Path(output)
    writers.check(target)
    total = sum(1 for _ in texts_of(path, columns))
    if not total:
        raise ValueError(f"{path}: has no text in it")
    if options.get("pool") == SENTENCE:
        options |= sentence(source, options)
    extractor = Extractor(pretrained.load(source, tokenizer), **options)
    found = extractor.found
    about = {
        "model": str(source), "step": found.step, "tokenizer_sha256": found.tokenizer.sha256,
        "layers": options.get("layers", "last"), "pool": extractor.pool,
    }  # fmt: skip
    form = Form(extractor.width, extractor.dtype, extractor.pool != "none", found.tokenizer.pieces, about)
    facts = {
        "weights": pretrained.fingerprint(found.weights), "input": sha256_of(path), "columns": list(columns),
        "options": options | {"max_length": extractor.max_length, "batch_tokens": extractor.batch_tokens},
    }  # fmt: skip
    with (
        writers.appearing(target, form, facts) as writer,
        tqdm(total=total, initial=writer.texts, unit=" texts", disable=None, leave=False) as bar,
    ):
        if writer.texts:
            log.info(f"{output}: goes on behind {writer.texts:,} of {total:,} texts")
        rest = islice(texts_of(path, columns), writer.texts, None)
        with closing(extractor.parts(rest)) as parts:
            for part in parts:
                writer.add(part)
                bar.update(len(part.lengths))
    return Done(total, writer.truncated, extractor.max_length)


def sentence(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Extractor's options for the vectors of texts that a sentence-transformers folder describes. Raises ValueError where
    `source` is none, or `options` ask for other layers."""
    if not sentence_folder.is_sentence_folder(source):
        raise ValueError(
            f"{source}: has no {sentence_folder.MODULES}, so it does not say how texts are pooled; name a folder that "
            "`megabert embed train` made (OUTPUT/seed1/best), or --pool mean"
        )
    if options.get("layers", "last") != "last":
        raise ValueError(f"--pool {SENTENCE}: is of the last layer; leave --layers out, or pool by cls, mean or max")
    pooling = sentence_folder.read(source)
    length = options.get("max_length") or pooling.max_length
    return {"pool": pooling.pool, "normalise": pooling.normalise, "max_length": length}


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.features"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, one checkpoint in it, or a Hugging Face folder")
    add("--input", metavar="FILE", help="a text a line, or with --text a table: .tsv, .csv, .jsonl; also .gz")
    add("--output", metavar="FILE", help="file to write: .npz, .parquet or .safetensors; must not exist")
    add("--text", action="append", default=[], metavar="COLUMN", help="column of the text; twice for a pair")
    add("--layers", default="last", help=f"{LAYERS}; 0 is the embeddings, sum-all leaves them out")
    add(
        "--pool",
        default="none",
        choices=(*POOLS, SENTENCE),
        help="none: a vector a token, [CLS] and [SEP] too; else one a "
        "text: of [CLS] (of [SEP] in a left-to-right model), or mean or max over all of its tokens; sentence: as the model's "
        "folder says, which `megabert embed train` made",
    )
    add("--dtype", default="float32", choices=("float32", "float16"), help="of the vectors")
    add("--max-length", type=int, default=0, metavar="N", help="cut longer texts to N tokens; 0: to the model's most")
    add(
        "--precision",
        default="fp32",
        choices=tuple(PRECISIONS),
        help="of the model: bf16 is about twice as fast where the processor has it, and right to 2 to 3 digits",
    )
    add(
        "--batch-tokens", type=int, metavar="N",
        help="tokens computed at once, on the CPU by each core; on a GPU 4096 (default: 1024)",
    )  # fmt: skip
    add(
        "--tokenizer",
        default="",
        metavar="FILE",
        help="the run's tokenizer, where its dataset is no longer in its place",
    )
    add("--compare", metavar="WORD", help="show the cosines between the uses of a word in TEXTs instead")
    add("texts", nargs="*", metavar="TEXT", help="texts that --compare looks at")
    args = parser.parse_args(argv)
    options = {
        "layers": args.layers, "max_length": args.max_length, "batch_tokens": args.batch_tokens,
        "precision": args.precision,
    }  # fmt: skip
    if args.compare:
        if not args.texts or args.input or args.output or args.text:
            raise ValueError("--compare WORD TEXT…: takes texts, and no --input, --output and --text")
        extractor = Extractor(pretrained.load(args.model, args.tokenizer), **options)
        print(comparison(args.compare, uses_of(args.compare, args.texts, extractor), args.layers))
        return OK
    if not args.input or not args.output or args.texts:
        raise ValueError("give --input FILE and --output FILE, or --compare WORD TEXT…")
    if len(args.text) > 2:
        raise ValueError(f"--text {args.text[2]}: a pair has two texts, this is a third")
    options |= {"pool": args.pool, "dtype": args.dtype}
    keep_freed_memory()
    try:
        done = extract(args.model, args.input, args.output, args.text, args.tokenizer, **options)
    except KeyboardInterrupt:
        kept = folder_of(Path(args.output)).exists()
        log.error(f"interrupted; {'the same command goes on' if kept else 'nothing was written'}")
        return INTERRUPTED
    log.info(f"{args.output}: vectors of {done.texts:,} texts")
    if done.truncated:
        log.warning(
            f"{done.truncated:,} of them are longer than {done.max_length} tokens and lost their end: `truncated` "
            "says which"
        )
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))
