"""Options of a build that affect its bytes.

A field of `BuildOptions` declares an argument of the command line, its range and an entry of the manifest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput
from data_prep.common.records import AUTO, FORMATS, TEXT_DOCUMENTS, ReadOptions
from data_prep.filters import rules
from data_prep.filters.classifiers import Classifier
from data_prep.filters.functions import FilterFunction
from megabert.common.environment import require_packages
from megabert.common.files import hash_file

BLOCK_ROWS = 256
LEAST_VOCABULARY = 16
DEDUP = ("documents", "near", "paragraphs")
# groups of options; those of the second matter only for training a tokenizer
ROWS, TOKENIZER, READING = "rows", "tokenizer", "reading"


def _option(
    default: Any, group: str, text: str, low: float | None = None, high: float | None = None, **keywords: Any
) -> Any:
    """A field with its help text, the range of its value, and more keywords of `add_argument`."""
    limits = None if low is None else (low, high)
    return field(default=default, metadata={"group": group, "range": limits, "argument": {"help": text, **keywords}})


@dataclass(frozen=True)
class BuildOptions:
    """Options of `data_prep build` except for input, output and execution."""

    seq_len: tuple[int, ...] = _option(
        (128,), ROWS, "tokens a row; several lengths make a dataset each, in DIR/seqN", 8, 8192, metavar="N"
    )
    nsp: bool = _option(False, ROWS, "sentence pairs instead of running text, for presets with model.nsp=true")
    held_out: float = _option(
        0.01, ROWS, "share held out for evaluation, of documents or, if they are few, of passages", 0, 0.5
    )
    rows_per_shard: int = _option(65_536, ROWS, "rows of each shard but the last", BLOCK_ROWS, 1 << 24)
    seed: int = _option(0, ROWS, "seed of shuffling, pairs and held-out documents", 0, 2**32 - 1)

    vocab_size: int = _option(
        30_000, TOKENIZER, "vocabulary size of the tokenizer to train", LEAST_VOCABULARY, 1_000_000
    )
    model_type: str = _option(
        "unigram", TOKENIZER, "kind of the tokenizer to train; wordpiece makes a vocab.txt", choices=("unigram", "bpe", "wordpiece")
    )  # fmt: skip
    normalization: str = _option(
        "nfc", TOKENIZER, "Unicode's normal form of a trained tokenizer's text: nfkc also replaces ligatures, superscripts and the like", choices=("nfc", "nfkc", "none")
    )  # fmt: skip
    lowercase: bool = _option(False, TOKENIZER, "train an uncased tokenizer")
    casing: str = _option(
        "any", TOKENIZER, "language whose rules --lowercase follows: Turkish or Azerbaijani, where I has a form with and one without a dot", choices=("any", "tr", "az")
    )  # fmt: skip
    character_coverage: float = _option(
        0.9995, TOKENIZER, "share of the sample's characters that get a token; 1 for small alphabets", 0.98, 1, metavar="SHARE"
    )  # fmt: skip
    sample_megabytes: int = _option(20, TOKENIZER, "text for training the tokenizer", 1, 200)

    format: str = _option(AUTO, READING, "auto: by content", choices=(AUTO, *FORMATS))
    text_documents: str = _option(
        AUTO, READING, "what a document is in plain text: a file (cut every 8 MiB), a block between blank lines, a line, or what "
        "follows a heading of WikiText (` = Title = `); auto: one of them for each input folder or archive, by a sample of its files",
        choices=TEXT_DOCUMENTS,
    )  # fmt: skip
    text_field: str = _option(
        "text", READING, "field or column with the text; article.body is nested, body[].text in each record of a list, title+abstract joins two; 3 is "
        "the third column of a CSV without names", metavar="NAME"
    )  # fmt: skip
    filters: tuple[str, ...] = _option(
        ("off",), READING, "gopher, c4, rules: NAME=LIMIT (listed below), or a function of your own: FILE.py:FUNCTION", metavar="RULE",
    )  # fmt: skip
    classifier: tuple[str, ...] = _option(
        (), READING, "fastText models: documents to which FILE gives LABELS (a,b) less than P together are dropped, such as "
        "lid.176.ftz:en:0.65", metavar="FILE:LABELS:P",
    )  # fmt: skip
    save_text: bool = _option(
        False, READING, "write the documents of the rows to DIR/text, as Parquet that another build can read"
    )
    dedup: tuple[str, ...] = _option(
        ("documents",), READING, "drop repeated documents, near duplicates (MinHash), repeated paragraphs", choices=("none", *DEDUP)
    )  # fmt: skip
    paragraph_characters: int = _option(
        40, READING, "characters, without spaces, from which on repeated paragraphs are dropped; headings and answers have fewer", 1, 1 << 20
    )  # fmt: skip
    encoding_errors: str = _option(
        "stop", READING, "bytes that are not UTF-8, and lone surrogates in JSON: bad input, or replaced by U+FFFD and counted", choices=("stop", "replace")
    )  # fmt: skip
    near_threshold: float = _option(0.45, READING, "share of common shingles of near duplicates", 0.3, 1)
    near_words: int = _option(3, READING, "words of a shingle", 1, 32)
    near_characters: int = _option(5, READING, "characters of a shingle in scripts without spaces", 1, 64)

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        groups = {name: parser.add_argument_group(name) for name in (ROWS, TOKENIZER, READING)}
        for item in fields(BuildOptions):
            default, keywords = item.default, dict(item.metadata["argument"])
            if isinstance(default, bool):
                keywords["action"] = "store_true"
            elif isinstance(default, tuple):
                keywords |= {"nargs": "+", "default": list(default), "type": type(default[0]) if default else str}
            else:
                keywords |= {"default": default, "type": type(default)}
            groups[item.metadata["group"]].add_argument(_flag(item.name), **keywords)

    @staticmethod
    def of(args: argparse.Namespace) -> BuildOptions:
        """The options of parsed arguments. Raises BadInput for a value that `check` refuses."""
        values = {item.name: getattr(args, item.name) for item in fields(BuildOptions)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "none" in values["dedup"] and len(values["dedup"]) > 1:
            raise BadInput("--dedup: none excludes the others")
        values["dedup"] = tuple(kind for kind in DEDUP if kind in values["dedup"])
        options = BuildOptions(**values)
        options.check()
        return options

    def check(self) -> None:
        """Raises BadInput naming the option that is out of range."""
        for item in fields(self):
            value, limits = getattr(self, item.name), item.metadata["range"]
            for number in (value if isinstance(value, tuple) else (value,)) if limits else ():
                if not limits[0] <= number <= limits[1]:
                    raise BadInput(f"{_flag(item.name)}: must lie in {limits[0]}..{limits[1]}, is {number}")
        if len(set(self.seq_len)) < len(self.seq_len):
            raise BadInput(f"--seq-len: a length is named twice: {' '.join(map(str, self.seq_len))}")
        if self.casing != "any" and not self.lowercase:
            raise BadInput(f"--casing: {self.casing} is of --lowercase, which is not given")
        for name in ("near_threshold", "near_words", "near_characters", "paragraph_characters"):
            kind = "near" if name.startswith("near") else "paragraphs"
            if kind not in self.dedup and getattr(self, name) != getattr(BuildOptions, name):
                raise BadInput(f"{_flag(name)}: is of --dedup {kind}, which is not given")
        if self.rows_per_shard % BLOCK_ROWS:
            raise BadInput(f"--rows-per-shard: must be a multiple of {BLOCK_ROWS}, is {self.rows_per_shard}")
        if "near" in self.dedup:
            require_packages("--dedup near", "near", "rensa")
        if not self.text_field.strip("+. "):
            raise BadInput(f"--text-field {self.text_field!r}: has no name of a field")
        assert self.rules is not None and self.custom_filters is not None

    @cached_property
    def rules(self) -> dict[str, float]:
        """Limits of quality rules by name."""
        return rules.parse([item for item in self.filters if not FilterFunction.is_meant(item)])

    @cached_property
    def custom_filters(self) -> tuple[Classifier | FilterFunction, ...]:
        """The filters that read a file of the user."""
        functions = (FilterFunction.parse(item) for item in self.filters if FilterFunction.is_meant(item))
        return (*map(Classifier.parse, self.classifier), *functions)

    def custom_filter_reason(self, text: str, metadata: dict[str, Any]) -> str:
        """Why one of the user's filters drops a document; "" if they keep it."""
        return next(filter(None, (each.objection(text, metadata) for each in self.custom_filters)), "")

    @property
    def read(self) -> ReadOptions:
        return ReadOptions(self.format, self.text_documents, self.text_field, self.encoding_errors)

    @property
    def kind(self) -> str:
        """The kind of the tokenizer to train, as `Tokenizer.kind`."""
        return "wordpiece" if self.model_type == "wordpiece" else "sentencepiece"

    def changed_training(self) -> list[str]:
        """The options of training a tokenizer that are not the defaults."""
        training = (item for item in fields(self) if item.metadata["group"] == TOKENIZER)
        return [_flag(item.name) for item in training if getattr(self, item.name) != item.default]

    def listed(self, trained: bool) -> dict[str, Any]:
        """The options as in manifests and build.json, with digests of filter files; those of training if `trained`."""
        training = {item.name for item in fields(self) if item.metadata["group"] == TOKENIZER}
        listed = {name: value for name, value in asdict(self).items() if trained or name not in training}
        listed["digests"] = {item.path: hash_file(Path(item.path)) for item in self.custom_filters}
        as_json: dict[str, Any] = json.loads(json.dumps(listed))  # tuples become lists
        return as_json


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
