"""Texts in twelve languages and nine scripts: built and tagged without losing their tokens.

`scripts/LANGUAGE.txt` holds a sentence a line, written for this. Documents are drawn from them, several to a paragraph.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.text import clean, sentences
from megabert.data.shards import Dataset
from megabert.data.text import clean_word, writes_without_spaces
from megabert.data.tokenizer import Tokenizer
from megabert.finetune.encoding import TaskEncoding
from megabert.finetune.files import SentenceExample
from megabert.finetune.tasks import Task
from tests.helpers.prep_builds import build_here, build_words, report
from tests.helpers.prep_reading import records, write, write_all
from tests.helpers.refusal import refusal

SAMPLES = Path(__file__).parent / "scripts"
LANGUAGES = sorted(path.stem for path in SAMPLES.glob("*.txt"))
NO_SPACE = ("ja", "zh")  # between sentences
SEQ_LEN = 256
MORE = {  # scripts whose ends alone are tried: Burmese, Khmer, Tibetan, Ethiopic as it is typed, Japanese's half-width stop
    "my": ["ဤစာအုပ်သည်ကောင်း၏။", "ကျွန်ုပ်ဖတ်ပြီးပြီ။", "သူလည်းဖတ်သည်။"],
    "km": ["នេះជាសៀវភៅ។", "ខ្ញុំបានអានវា។"],
    "bo": ["འདི་དཔེ་ཆ་རེད།", "ང་ཡིས་བཀླགས་པ་ཡིན།"],
    "am-ascii": ["ይህ መጽሐፍ ነው::", "እኔ አነበብኩት፡፡", "አዎ።"],
    "hy-ascii": ["Սա գիրք է:", "Ես կարդացի այն:"],
    "ja-half": ["天気がいい｡", "散歩しましょう｡"],
    "en-lower": 8 * ["this text has no capitals at all, as some corpora have.", "its sentences end all the same."],
}


def lines(language):
    return (SAMPLES / f"{language}.txt").read_text(encoding="utf-8").splitlines()


def documents(language, count=100):
    """Documents of 15 to 60 sentences in paragraphs of 3 to 6."""
    rng, glue, known = random.Random(3), "" if language in NO_SPACE else " ", lines(language)
    sizes = ([rng.randint(3, 6) for _ in range(rng.randint(5, 10))] for _ in range(count))
    return ["\n".join(glue.join(rng.choices(known, k=size)) for size in document) for document in sizes]


def split(text):
    """The sentences of a document as the encoder would find them."""
    paragraphs = [paragraph.split() for paragraph in clean.paragraphs(text, False)]
    starts = np.array(sentences.starts([word for words in paragraphs for word in words]), np.uint8)
    (kinds,) = sentences.allowed(starts, np.array([0, len(starts)]))
    found = []
    for words in filter(None, paragraphs):
        begins = np.flatnonzero(sentences.ends(words)[:-1] & sentences.starts(words)[1:] & kinds) + 1
        found += [" ".join(part) for part in np.split(np.array(words, object), begins)]
    return found


@pytest.mark.parametrize("language", [*LANGUAGES, *MORE])
def test_sentences_end_where_their_script_ends_them(language):
    want = MORE.get(language) or lines(language)
    glued = language in (*NO_SPACE, "my", "ja-half")
    assert split(("" if glued else " ").join(want)) == want


def test_quotations_change_nothing_in_english_text():
    text = "It is called 東京。 in Japan. The word (Thai: ไทย แลนด์) is older. see below. "
    text += "Nothing else is here. " * 20
    assert split(text) == sentences.split(text)


@pytest.fixture(scope="module", params=LANGUAGES)
def built(request, tmp_path_factory):
    """(language, its dataset)."""
    folder = tmp_path_factory.mktemp(request.param)
    path = write(folder / "text.jsonl", records(documents(request.param)))
    options = {"seq_len": SEQ_LEN, "vocab_size": 400, "model_type": "bpe", "character_coverage": 1}
    build_here(path, folder / "out", nsp=True, workers=1, **options)
    return request.param, folder / "out"


def test_little_is_lost_half_the_pairs_random(built):
    language, folder = built
    facts = Dataset(folder).manifest.statistics
    assert facts["truncated_tokens"] < 0.05 * (facts["corpus_tokens"] + facts["borrowed_tokens"])
    assert 0.45 <= facts["random_next_share"] <= 0.55
    assert report(folder)["read"]["sentences"] == sum(len(split(text)) for text in documents(language))


def test_tags_are_read_from_first_tokens(built):
    language, folder = built
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    spaced = not writes_without_spaces(lines(language)[0][0])
    texts = [tuple(text.split() if spaced else "".join(text.split())) for text in lines(language)]
    examples = [SentenceExample(str(i), "", words, ("O",) * len(words)) for i, words in enumerate(texts)]
    task = Task(name="tags", kind="tag", text=("0",), label="1", metrics=("accuracy",))
    for item, words in zip(TaskEncoding(task, tokenizer, ("O", "X"), SEQ_LEN).encode(examples), texts, strict=True):
        assert len(item.positions) == len(words) and (np.diff(item.positions) > 0).all()
        for word, token in zip(words, item.ids[item.positions].tolist(), strict=True):
            shown = tokenizer.tokens[token].strip()
            assert shown and clean_word(word).startswith(shown), (word, shown)
        if not spaced:  # a space before the sentence and none inside, as in pre-training
            assert not tokenizer.word_start[item.ids[2:-1]].any()


def test_vocabulary_of_unknown_casing_is_refused(tmp_path, capsys):
    letters = sorted({c for line in lines("hi") for c in line if not c.isspace()})
    vocabulary = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [*letters, *(f"##{c}" for c in letters)]
    write_all(tmp_path, {"vocab.txt": "\n".join([*vocabulary, ""]), "in.txt": "\n".join(documents("hi", 9))})
    out, options = tmp_path / "out", {"tokenizer": tmp_path / "vocab.txt", "text_documents": "line"}
    command = build_words(tmp_path / "in.txt", out, workers=1, **options)
    error = refusal(capsys, main, *command)
    assert "no tokenizer_config.json beside it" in error and '"do_lower_case": false' in error
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert main(command) == 0
    tokenizer = Tokenizer.load(Dataset(out).tokenizer_path)
    assert tokenizer.decode(tokenizer.encode_texts(["किताबें"])[0]).replace(" ", "") == "किताबें"
    entry = Dataset(out).manifest.tokenizer
    assert entry["special_ids"] == {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
    assert {*Dataset(out).read(np.arange(3)).ids[:, 0]} == {101}
    assert tokenizer.sha256 == entry["sha256"] and main(["verify", str(out), "--quiet"]) == 0
    (out / "tokenizer_config.json").unlink()  # what the rows were made with is lost, and that is seen
    assert main(["verify", str(out), "--quiet"]) == 1
