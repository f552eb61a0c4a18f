"""`python -m data_prep build | verify | inspect`: a user's mistake is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path

from data_prep import inspection, parallel, report, verification
from data_prep.build import build
from data_prep.options import BuildOptions
from data_prep.sources import ReadOptions
from megabert import shards


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m data_prep", description="Raw text to verified shards.")
    commands = top.add_subparsers(dest="command", required=True)
    d, r = BuildOptions(), ReadOptions()
    p = commands.add_parser(
        "build", help="text to shards", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument(
        "--input", nargs="+", required=True, metavar="PATH",
        help="files, folders, globs, or the word pydoc: text, WikiExtractor output, JSONL, each also .gz .bz2 .xz .zst",
    )  # fmt: skip
    p.add_argument("--output", required=True, metavar="DIR", help="folder of the dataset")
    p.add_argument("--seq-len", type=int, default=d.seq_len, help="tokens a row")
    p.add_argument("--vocab-size", type=int, default=d.vocab_size, help="pieces of the tokenizer to train")
    p.add_argument("--model-type", choices=("unigram", "bpe"), default=d.model_type)
    p.add_argument("--lowercase", action="store_true", help="train an uncased tokenizer")
    p.add_argument(
        "--sample-megabytes", type=int, default=d.sample_megabytes, help="text to train the tokenizer on"
    )
    p.add_argument("--tokenizer", metavar="FILE", help="use this tokenizer.model and train none")
    p.add_argument("--workers", type=int, help="processes (default: the cores)")
    p.add_argument("--seed", type=int, default=d.seed)
    p.add_argument("--no-nsp", action="store_true", help="full sentences in place of sentence pairs")
    p.add_argument(
        "--short-share", type=float, default=d.short_share, help="share of pairs that aim at a shorter length"
    )
    p.add_argument(
        "--held-out", type=float, default=d.held_out, help="share of documents kept for evaluation"
    )
    p.add_argument(
        "--max-sequences",
        type=int,
        default=d.max_sequences,
        help="sequences packed in a row at most; 0: as few as fill rows within half a percent of the best",
    )
    p.add_argument("--rows-per-shard", type=int, default=d.rows_per_shard)
    p.add_argument(
        "--format", choices=("auto", "text", "wiki", "jsonl"), default=r.format, help="auto: by content"
    )
    p.add_argument(
        "--text-documents", choices=("auto", "file", "blank-line", "line"), default=r.text_documents,
        help="what a document is in plain text; auto: a file up to 16 MiB is one, a larger one has blank lines between",
    )  # fmt: skip
    p.add_argument("--text-field", default=r.text_field, help="field of a JSON line that holds the text")
    p.add_argument(
        "--keep-titles", action="store_true", help="keep the title line of WikiExtractor documents"
    )
    p.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default=d.on_error,
        help="bad input: stop, or drop and count it",
    )
    p.add_argument("--overwrite", action="store_true", help="replace a dataset in DIR")
    p.add_argument("--json", metavar="FILE", help="write the summary there too")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    for name, text in (("verify", "check every byte"), ("inspect", "show what is in it")):
        p = commands.add_parser(name, help=text)
        p.add_argument("folder", metavar="DIR")
        if name == "inspect":
            p.add_argument("--rows", type=int, default=3, help="sample rows to decode")
            p.add_argument("--seed", type=int, default=0, help="of the sample")
    return top


def _build(args: argparse.Namespace) -> int:
    if args.workers is not None and args.workers < 1:
        raise ValueError(f"--workers: must be at least 1, is {args.workers}")
    options = BuildOptions(
        seq_len=args.seq_len,
        max_sequences=args.max_sequences,
        nsp=not args.no_nsp,
        short_share=args.short_share,
        held_out=args.held_out,
        seed=args.seed,
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        lowercase=args.lowercase,
        sample_megabytes=args.sample_megabytes,
        rows_per_shard=args.rows_per_shard,
        on_error=args.on_error,
        read=ReadOptions(args.format, args.text_documents, args.text_field, args.keep_titles),
    )
    executor = parallel.make(args.workers)
    if isinstance(executor, parallel.Ranks) and not executor.is_root:
        executor.serve()
        return 0
    try:
        summary = build(
            args.input,
            args.output,
            options,
            executor,
            args.tokenizer,
            args.overwrite,
            progress=not args.quiet,
        )
    finally:
        executor.close()
    print(report.summary_text(summary, args.output))
    if args.json:
        Path(args.json).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "build":
            return _build(args)
        if args.command == "inspect":
            print(inspection.inspect(args.folder, args.rows, args.seed))
            return 0
        found = 0
        for problem in verification.verify(args.folder, os.cpu_count() or 1, progress=True):
            print(problem)
            found += 1
        if not found:
            for folder in verification.datasets(args.folder):
                print(f"{folder}: whole, {shards.Manifest.load(folder).rows} rows")
        return 1 if found else 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "the disk is full (or a file size limit is reached)" if full else error.strerror or str(error)
        where = error.filename or getattr(args, "output", "") or getattr(args, "folder", "")
        print(f"error: {os.fspath(where)}: {what}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
