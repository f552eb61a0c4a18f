"""Words for the [MASK]s of a sentence, from a run's newest checkpoint, also while it is still training, or from a Hugging
Face folder.

megabert fill --model DIR "The capital of France is [MASK]."
megabert fill --model DIR                    asks for sentences; two texts with ||| between them are a pair

A causal run fills in one [MASK], from what stands before it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK, code_of, command, describe
from megabert.common.logs import log

if TYPE_CHECKING:
    from megabert.hf import Pretrained

MASK = "[MASK]"
BETWEEN = "|||"
PROMPT = "text with [MASK] (an empty line ends) > "


@dataclass(frozen=True)
class Filled:
    """`words[m]` are the best (word, probability) of mask m; `follows` is how likely B follows A, None without a pair."""

    words: list[list[tuple[str, float]]]
    follows: float | None


class Filler:
    """A model and its tokenizer, ready to fill in; on the CPU, so that a run's GPU stays its own."""

    def __init__(self, pretrained: Pretrained) -> None:
        """Raises ValueError for a Hugging Face folder whose weights are no masked language model's."""
        import torch

        from megabert.hf import tokenizer_files
        from megabert.hf.read import MLM_HEAD

        if MLM_HEAD in pretrained.initialised:
            raise ValueError(
                f"{pretrained.run_dir}: has no {MLM_HEAD} (cls.predictions…), so it cannot fill; name another"
            )
        self.pretrained, self.tokenizer = pretrained, pretrained.tokenizer
        self.model = pretrained.model(torch.device("cpu"))
        self.encoder: Any = tokenizer_files.build(pretrained.tokenizer)

    def fill(self, text: str, pair: str = "", top: int = 5) -> Filled:
        """The `top` likeliest tokens of every [MASK]. Raises ValueError without a mask, with more than one where the model is
        causal (it has never seen a [MASK]), or for too long a text."""
        import numpy as np
        import torch

        from megabert.data.packing import pack
        from megabert.hf.read import NSP_HEAD, POOLER

        if not self.tokenizer.keeps_whitespace:
            text, pair = text.strip(), pair.strip()
        if any("\ud800" <= character <= "\udfff" for character in text + pair):
            raise ValueError("the text is not valid UTF-8; type it in a UTF-8 terminal")
        text, pair = self.tokenizer.plain(text), self.tokenizer.plain(pair)
        encoded, first = self._encode(text, pair)
        config = self.pretrained.config
        ids, most, causal = np.array(encoded), config.model.max_positions, config.data.masking.causal
        masks = torch.from_numpy((ids == self.tokenizer.mask_id).nonzero()[0])
        if not len(masks):
            raise ValueError(f"the text has no {MASK}; put one where a word is wanted")
        if len(ids) > most:
            raise ValueError(f"the text has {len(ids)} tokens, the model takes at most {most}; shorten it")
        if causal and len(masks) > 1:
            raise ValueError(f"the run is causal and fills in one {MASK}, not {len(masks)}")
        inputs = pack([ids], [first], causal=causal).inputs()
        # the masks (or what is before), then [CLS]
        keep = torch.cat([masks - int(causal), masks.new_zeros(1)])
        follows = None
        with torch.no_grad():
            hidden = self.model.encode(**inputs, keep=keep)
            best = self.model.mlm_logits(hidden[:-1]).softmax(-1).topk(min(top, self.tokenizer.vocab_size))
            if pair and config.model.nsp and not {POOLER, NSP_HEAD} & {*self.pretrained.initialised}:
                follows = float(self.model.nsp_logits(hidden[-1:]).softmax(-1)[0, 0])
        words = [
            [(self._word(i), p) for i, p in zip(ids, probabilities, strict=True)]
            for ids, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return Filled(words, follows)

    def _encode(self, text: str, pair: str) -> tuple[list[int], int]:
        """(ids of a text, or of two with their separators, how many are of the first)."""
        tokenizer = self.tokenizer
        if not tokenizer.keeps_whitespace:
            encoded = self.encoder.encode(text, pair) if pair else self.encoder.encode(text)
            return encoded.ids, encoded.type_ids.count(0)
        first = [tokenizer.cls_id, *self._kept(text), tokenizer.sep_id]
        return first + ([*self._kept(pair), tokenizer.sep_id] if pair else []), len(first)

    def _kept(self, text: str) -> list[int]:
        """Ids of a text whose whitespace is kept. A [MASK] stands for a word and one space before it."""
        before, *after = re.split(f" ?{re.escape(MASK)}", text)
        ids = self.tokenizer.encode_texts([before])[0]
        for part in self.tokenizer.encode_chunks(after):
            ids += [self.tokenizer.mask_id, *part]
        return ids

    def _word(self, i: int) -> str:
        """A token as it is shown: letters that continue the word before them begin with ##."""
        tokenizer = self.tokenizer
        shown, whole = tokenizer.tokens[i], tokenizer.word_start[i] or i in tokenizer.special_ids.values()
        shown = shown.removeprefix(" ") if whole else f"##{shown}" if shown[:1].isalnum() else shown
        return shown if shown.isprintable() and shown else ascii(shown)


def table(filled: Filled) -> str:
    """Ranks down, masks across, columns aligned."""
    columns = [[(word, f"{p:.1%}") for word, p in words] for words in filled.words]
    widths = [max(len(word) for word, _ in column) for column in columns]
    lines = []
    if len(columns) > 1:
        heads = (f"{MASK} {m}".ljust(w + 8) for m, w in enumerate(widths, 1))
        lines.append("    " + "  ".join(heads).rstrip())
    for rank in range(len(columns[0])):
        cells = (f"{c[rank][0].ljust(w)}  {c[rank][1]:>6}" for c, w in zip(columns, widths, strict=True))
        lines.append(f"{rank + 1:>2}  " + "  ".join(cells))
    if filled.follows is not None:
        lines.append(f"the second text follows the first: {filled.follows:.1%}")
    return "\n".join(lines)


def interactive(source: str, tokenizer: str, filler: Filler, top: int) -> None:
    """Ask, fill, and take the newest checkpoint before each answer, until an empty line or the end of the input."""
    from megabert import checkpoint, hf

    log.info(f"-- {source}, step {filler.pretrained.step:,}")
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if not line:
            return
        try:
            if checkpoint.newest_step(source) not in (None, filler.pretrained.step):
                filler = Filler(hf.load(source, tokenizer))
                log.info(f"-- step {filler.pretrained.step:,}")
            text, _, pair = line.partition(BETWEEN)
            print(table(filler.fill(text, pair, top)), flush=True)
        except (ValueError, OSError) as error:
            log.error(describe(error))


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.fill"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, one checkpoint in it, or a Hugging Face folder")
    add("--pair", default="", metavar="TEXT", help="a second text, which may have masks too")
    add("--top", type=int, default=5, metavar="K", help="words a mask")
    moved = "the run's tokenizer, where its dataset is no longer in its place"
    add("--tokenizer", default="", metavar="FILE", help=moved)
    add("text", nargs="?", default="", help=f"text with {MASK}; without it, asks for texts")
    args = parser.parse_args(argv)
    if args.top < 1:
        raise ValueError(f"--top {args.top}: must be 1 or more")
    text, _, pair = args.text.partition(BETWEEN)
    if pair and args.pair:
        raise ValueError(f"--pair and {BETWEEN} in the text: give one of them")
    if args.pair and not text:
        raise ValueError("--pair without a text: give the first text too")
    if text and MASK not in args.text + args.pair:
        raise ValueError(f"the text has no {MASK}; put one where a word is wanted")
    from megabert import hf

    filler = Filler(hf.load(args.model, args.tokenizer))
    if text:
        print(table(filler.fill(text, pair or args.pair, args.top)))
    else:
        interactive(args.model, args.tokenizer, filler, args.top)
    return OK


if __name__ == "__main__":
    sys.exit(code_of(main))
