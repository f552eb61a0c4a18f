"""Arguments of `data_prep`: the options of its commands, and how they become the options of a build."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

from data_prep.common.errors import BadInput
from data_prep.common.records import Corpus, ReadOptions
from data_prep.filters import rules
from data_prep.filters.classifiers import Classifier
from data_prep.options import DEDUP, BuildOptions
from data_prep.text import clean
from megabert.common.arguments import Parser, called_as

if TYPE_CHECKING:
    from megabert.data.tokenizer import Tokenizer


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; `description` stands above their list."""
    top = Parser(prog=called_as("data_prep"), description=description)
    commands = top.add_subparsers(dest="command", required=True, help="each has a --help of its own")
    rules_of = "rules of --filters:\n" + rules.describe_rules()
    _add_build(commands.add_parser("build", help="text to shards", epilog=rules_of))
    p = commands.add_parser("verify", help="check every byte")
    p.add_argument("folder", metavar="DIR", help="what build wrote")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores)")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    p = commands.add_parser("inspect", help="show what is in it")
    p.add_argument("folder", metavar="DIR", help="what build wrote")
    p.add_argument("--rows", type=int, default=3, metavar="N", help="sample rows to decode")
    p.add_argument("--seed", type=int, default=0, help="of the sample and of the masking shown")
    p.add_argument("--masking", choices=("token", "word", "span"), default="token", help="of the rows shown")
    return top


def _add_build(p: argparse.ArgumentParser) -> None:
    d, r = BuildOptions(), ReadOptions()
    add = p.add_argument
    add("recipe", nargs="?", metavar="RECIPE",
        help="TOML file of options by these names, and a table [corpus.NAME] a corpus: input, weight, and of its own format, "
        "text_documents, text_field, keep_titles, encoding, split, language, filters")  # fmt: skip
    add("--input", nargs="+", metavar="[NAME=]PATH",
        help="files, folders, globs, or the word pydoc: MediaWiki XML dumps, "
        "WikiExtractor output, text, JSONL (each also .gz .bz2 .xz .zst), Parquet, saved Hugging Face datasets; "
        "NAME= starts a corpus of that name")  # fmt: skip
    add("--output", metavar="DIR",
        help="folder of the dataset")  # fmt: skip
    add("--seq-len", type=int, nargs="+", default=list(d.seq_lens), metavar="N",
        help="tokens a row; several make a dataset each, in DIR/seqN")  # fmt: skip
    add("--weight", nargs="+", default=[], metavar="NAME=W",
        help="how often a corpus is seen: 2 is every document twice, 0.5 a half of them")  # fmt: skip
    g = p.add_argument_group("tokenizer")
    add = g.add_argument
    add("--tokenizer", metavar="FILE", help="use this tokenizer.model or vocab.txt and train none")
    add("--vocab-size", type=int, default=d.vocab_size, help="tokens of the tokenizer to train")
    add("--tokenizer-case", choices=("cased", "uncased"),
        help="of a vocab.txt without a tokenizer_config.json beside it: uncased text is lower-cased")  # fmt: skip
    add("--tokenizer-accents", choices=("keep", "strip"),
        help="likewise: strip drops all non-spacing marks, vowel signs too (default: strip what is uncased)")  # fmt: skip
    add("--model-type", choices=("unigram", "bpe", "wordpiece"), default=d.model_type,
        help="of the tokenizer to train; wordpiece makes a vocab.txt")  # fmt: skip
    add("--character-coverage", type=float, default=d.character_coverage, metavar="SHARE",
        help="of the sample's characters that get a token; 1 for small alphabets and code")  # fmt: skip
    add("--byte-fallback", action="store_true", help="tokens for bytes in place of [UNK]")
    add("--keep-whitespace", action="store_true",
        help="runs of spaces, tabs and line ends become tokens that decode to the same whitespace, for code and formulas; takes "
        "--normalization none")  # fmt: skip
    add("--lowercase", action="store_true", help="train an uncased tokenizer")
    add("--sample-megabytes", type=int, default=d.sample_megabytes, help="text to train the tokenizer on")
    add("--sample-alpha", type=float, default=d.sample_alpha,
        help="a corpus gets a share of that text by its bytes to this power: 1 natural, 0.3 balances languages, 0 equal")  # fmt: skip
    g = p.add_argument_group("reading and cleaning")
    add = g.add_argument
    add("--format", choices=ReadOptions.choices("format"), default=r.format, help="auto: by content")
    add(
        "--encoding",
        default=r.encoding,
        metavar="NAME",
        help="auto: UTF-8, or what charset-normalizer detects with confidence",
    )
    add("--text-documents", choices=ReadOptions.choices("text_documents"), default=r.text_documents,
        help="what a document is in plain text; auto: by the first bytes of each file, blank-line where it has a sentence or a "
        "paragraph a line and blank lines between, else file, cut every 8 MiB")  # fmt: skip
    add("--text-field", default=r.text_field, metavar="NAME",
        help="field or column that holds the text; article.body is nested, title+abstract joins two")  # fmt: skip
    add("--split", default=r.split, metavar="NAME",
        help="of a saved dataset that has several, the one that is read; all: every one")  # fmt: skip
    add("--keep-titles", action="store_true", help="keep the title line of WikiExtractor documents")
    add("--normalization", choices=("NFC", "NFKC", "none"),
        help="Unicode normal form of the text, and of the tokenizer to train; none changes no character and no entity "
        "(default: NFC, and a tokenizer with NFKC: m² and m2 are equal)")  # fmt: skip
    add("--filters", nargs="+", default=["off"], metavar="RULE", help="gopher, c4, or rules: NAME=LIMIT (listed below)")
    add("--language-model", metavar="FILE",
        help="fastText model of languages, such as lid.176.ftz: documents that are not in --language are dropped")  # fmt: skip
    add("--language", nargs="+", default=[], metavar="LABEL", help="labels of that model to keep")
    add("--min-language", type=float, default=0.65, metavar="P", help="least probability of these together")
    add("--quality-model", metavar="FILE",
        help="fastText model of quality: documents that are not of --quality-label are dropped")  # fmt: skip
    add("--quality-label", nargs="+", default=[], metavar="LABEL", help="labels of that model to keep")
    add("--min-quality", type=float, default=0.5, metavar="P", help="least probability of these together")
    add("--mask", nargs="+", default=[], choices=clean.MASK_KINDS,
        help="replace e-mail and IP addresses by reserved ones, remove citation marks: [12], [edit]")  # fmt: skip
    add("--dedup", nargs="+", default=list(d.dedup), choices=("none", *DEDUP),
        help="drop repeated documents, near duplicates (MinHash), repeated paragraphs")  # fmt: skip
    add("--on-error", choices=("stop", "skip"), default="stop", help="bad input: stop, or drop and count it")
    g = p.add_argument_group("rows")
    add = g.add_argument
    add("--no-nsp", action="store_true", help="full sentences in place of sentence pairs")
    add("--short-share", type=float, default=d.short_share, help="share of pairs that aim at a shorter length")
    add("--max-sentence", type=int, default=d.max_sentence, metavar="N",
        help="tokens; longer sentences are split at the best place where pairs are made; 0: only where a fifth of a text is "
        "in sentences longer than a row")  # fmt: skip
    add("--allow", action="store_true",
        help="continue where more than 60%% of the pairs are random or more than 20%% of the tokens are cut off")  # fmt: skip
    add("--held-out", type=float, default=d.held_out, help="share of documents kept for evaluation")
    add("--max-sequences", type=int, default=d.max_sequences,
        help="packed in a row at most; 0: as few as fill rows within half a percent of the best")  # fmt: skip
    add("--rows-per-shard", type=int, default=d.rows_per_shard, help="rows of each shard but the last")
    add("--seed", type=int, default=d.seed, help="of the shuffle, the pairs and the held-out documents")
    g = p.add_argument_group("running")
    add = g.add_argument
    add("--workers", type=int, metavar="N", help="processes (default: the cores)")
    add("--print-recipe", action="store_true", help="print the recipe of this build and build nothing")
    add(
        "--overwrite",
        action="store_true",
        help="replace the dataset in DIR; an unfinished build with the same options is resumed",
    )
    add("--part", metavar="K/N", help="read one of N parts of the input, as one of N independent jobs")
    add("--merge", action="store_true", help="the rest of the build, when all parts are read")
    add("--json", metavar="FILE", help="write the summary there too; of a dataset that is complete already, its report")
    add("--quiet", action="store_true", help="no progress bar")


def corpora(inputs: list[str], weights: list[str]) -> list[Corpus]:
    """Corpora of `[NAME=]PATH` items; a path without a name belongs to the corpus that was named last."""
    paths: dict[str, list[str]] = {}
    name = "input"
    for item in inputs:
        named = re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", item, re.DOTALL)
        if named and not os.path.lexists(item):
            name, item = named.groups()
        paths.setdefault(name, []).append(item)
    factors: dict[str, float] = {}
    for item in weights:
        named = re.fullmatch(r"([A-Za-z][\w-]*)=(\d+(?:\.\d*)?|\.\d+)", item)
        if not named or not 0 < float(named[2]) <= 100:
            raise BadInput(f"--weight {item}: give NAME=W with W above 0 and at most 100")
        if named[1] not in paths:
            raise BadInput(f"--weight {item}: no corpus of that name; --input names {', '.join(paths)}")
        factors[named[1]] = float(named[2])
    return [Corpus(name, tuple(items), factors.get(name, 1.0)) for name, items in paths.items()]


def options_of(args: argparse.Namespace) -> BuildOptions:
    """The options of a build. Raises BadInput for an unknown rule and for options that exclude each other."""
    if "none" in args.dedup and len(args.dedup) > 1:
        raise BadInput("--dedup: none excludes the others")
    return BuildOptions(
        seq_lens=tuple(args.seq_len),
        max_sequences=args.max_sequences,
        nsp=not args.no_nsp,
        short_share=args.short_share,
        max_sentence=args.max_sentence,
        held_out=args.held_out,
        seed=args.seed,
        normalization=args.normalization or BuildOptions.normalization,
        model_form=args.normalization or BuildOptions.model_form,
        character_coverage=args.character_coverage,
        byte_fallback=args.byte_fallback,
        rules=rules.parse(args.filters),
        language=_classifier("language", args.language_model, args.language, args.min_language),
        quality=_classifier("quality", args.quality_model, args.quality_label, args.min_quality),
        mask=tuple(name for name in clean.MASK_KINDS if name in args.mask),
        dedup=tuple(name for name in DEDUP if name in args.dedup),
        keep_whitespace=args.keep_whitespace,
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        lowercase=args.lowercase,
        sample_megabytes=args.sample_megabytes,
        sample_alpha=args.sample_alpha,
        rows_per_shard=args.rows_per_shard,
        read=ReadOptions(
            format=args.format,
            text_documents=args.text_documents,
            text_field=args.text_field,
            keep_titles=args.keep_titles,
            encoding=args.encoding,
            split=args.split,
        ),
    )


def _classifier(name: str, path: str | None, labels: list[str], minimum: float) -> Classifier | None:
    if labels and not path:
        raise BadInput(f"--{name}: {' '.join(labels)} needs --{name}-model")
    return Classifier(path, tuple(labels), minimum) if path else None


def workers_of(args: argparse.Namespace) -> int | None:
    """--workers, None where it is left out. Raises BadInput below 1."""
    if args.workers is not None and args.workers < 1:
        raise BadInput(f"--workers: must be at least 1, is {args.workers}")
    return args.workers


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the command names, None where one is to be trained."""
    case, accents = args.tokenizer_case, args.tokenizer_accents
    if args.tokenizer is None:
        if case or accents:
            raise BadInput("--tokenizer-case, --tokenizer-accents: need --tokenizer")
        return None
    from megabert.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(
        args.tokenizer,
        lowercase=None if case is None else case == "uncased",
        strip_accents=None if accents is None else accents == "strip",
    )
    if tokenizer.kind != "wordpiece" and (case or accents):
        raise BadInput(f"--tokenizer {args.tokenizer}: a SentencePiece model has its own rules of case and accents")
    if doubt := tokenizer.doubt():
        raise BadInput(
            f"--tokenizer {doubt}; give --tokenizer-case cased, or uncased with --tokenizer-accents keep or strip"
        )
    return tokenizer


def part_of(args: argparse.Namespace) -> tuple[int, int] | None:
    """(K, N) of --part K/N."""
    if args.part is None:
        return None
    named = re.fullmatch(r"(\d+)/(\d+)", args.part)
    if not named or not 1 <= int(named[1]) <= int(named[2]):
        raise BadInput(f"--part {args.part}: give K/N with K from 1 to N")
    if args.merge or args.overwrite:
        raise BadInput("--part: excludes --merge and --overwrite")
    if args.json:
        raise BadInput("--json: a part has no summary; give it with --merge")
    return int(named[1]), int(named[2])


def actions() -> dict[str, argparse.Action]:
    """The options of build by their names."""
    build = argparse.ArgumentParser(add_help=False)
    _add_build(build)
    return {action.dest: action for action in build._actions}
