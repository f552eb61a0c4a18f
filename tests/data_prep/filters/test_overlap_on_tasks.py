"""Real evaluation files in real text: every planted sentence of SST-2, SQuAD and WNUT-17 is found, and hardly anything else."""

import os
import random
from pathlib import Path

import pytest

from data_prep.filters.overlap import MIN_LETTERS, MIN_WORDS, Evaluation, index
from data_prep.readers import evaluation
from data_prep.tokens.encoder import word_facts
from tests.helpers.prep_texts import articles

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "sst2": ("sst2/train.tsv", "sst2/dev.tsv"),
    "squad": ("squad1.1/train-v1.1.json.gz",),
    "wnut17": ("wnut17/wnut17train.conll", "wnut17/emerging.dev.conll"),
}
BATCH = 200


def counts(text):
    letters = word_facts([[text]], "NFC", folded=True).folded["letters"]
    return len(letters) >= MIN_WORDS and int(letters.sum()) >= MIN_LETTERS


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_all_that_is_planted_is_found_and_hardly_anything_else(name):
    data = Path(os.environ.get("MEGABERT_DATA") or ROOT.parent / "shared" / "data")
    if not (data / "tasks").is_dir():
        pytest.skip("no tasks: MEGABERT_DATA names no folder with them")
    texts = [text for file in FILES[name] for _, text in evaluation.texts(str(data / "tasks" / file))]
    found = Evaluation(*index(word_facts([t.split("\n") for t in texts], "NFC", folded=True)))
    if name == "squad":  # its passages are Wikipedia's own
        documents = [
            [" ".join(line.split()) for line in lines[first : first + 30]]
            for path in sorted((data / "novels").iterdir())
            for lines in [path.read_text(encoding="utf-8-sig").split("\n")]
            for first in range(0, len(lines), 30)
        ]
    else:
        documents = articles(4000)
    rng = random.Random(1)
    planted = rng.sample([text for text in texts if counts(text)], min(1500, len(documents) // 2))
    places = dict(zip(rng.sample(range(len(documents)), len(planted)), planted, strict=True))
    clean = {i for i in range(len(documents)) if i not in places}
    for i, text in places.items():
        at = rng.randint(0, len(documents[i]))
        documents[i] = [*documents[i][:at], *text.split("\n"), *documents[i][at:]]
    hits = set()
    for first in range(0, len(documents), BATCH):
        batch = word_facts(documents[first : first + BATCH], "NFC", folded=True)
        hits |= {first + match.document for match in found.find(batch)}
    missed = [places[i] for i in places if i not in hits]
    assert not missed, missed[:5]
    print(f"{name}: {len(places)} planted, all found; {len(hits & clean)} of {len(clean)} others")
    assert len(places) > 400 and len(hits & clean) < 0.001 * len(clean)
