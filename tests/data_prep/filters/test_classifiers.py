"""fastText models as filters: what the model says decides, mistakes are named."""

import json
import random
import struct
from pathlib import Path

import pytest

from data_prep.common.errors import BadInput
from data_prep.filters import classifiers
from data_prep.filters.classifiers import Classifier
from megabert.data.tokenizer import Tokenizer
from tests.helpers import fasttext_model
from tests.helpers.prep_builds import ROOT, build_here
from tests.helpers.prep_reading import write

pytest.importorskip("fasttext", reason="fasttext-predict is not installed")
OLD = ROOT / "tests/data/golden/dataset/tokenizer.model"
OPTIONS = {"seq_len": 32, "held_out": 0, "workers": 1}
TEXTS = {
    "en": "the house stands on a hill and it was good to see how many of them came",
    "de": "das Haus steht auf einem Berg und es war gut zu sehen wie viele kamen",
}


def text(language, rng, words=40):
    return " ".join(rng.choices(TEXTS[language].split(), k=words)) + "."


@pytest.fixture
def model(tmp_path):
    rng = random.Random(1)
    return str(fasttext_model.write(tmp_path / "lid.bin", {name: [text(name, rng, 400)] for name in TEXTS}))


def test_documents_are_kept_by_label_probability(model):
    rng = random.Random(2)
    english, german = text("en", rng), text("de", rng)
    one, both = Classifier(model, ("en",), 0.65), Classifier(model, ("en", "de"), 0.65)
    assert one.keeps(english) and not one.keeps(german) and both.keeps(english) and both.keeps(german)
    mixed = TEXTS["en"][:38] + TEXTS["de"][:38]
    assert not Classifier(model, ("en",), 0.999).keeps(mixed) and Classifier(model, ("en",), 0.0).keeps(mixed)
    assert not one.keeps("") and not one.keeps("\n\n")  # has no evidence
    assert one.keeps(english.replace(" ", "\n")) and one.keeps(text("en", rng, 4000)[:10_000] + german * 900)


def test_mistakes_are_named(model, tmp_path):
    (tmp_path / "no.bin").write_bytes(b"no model")
    for classifier, message in (
        (Classifier(str(tmp_path / "gone.bin"), ("en",), 0.5), "gone.bin: no such model file"),
        (Classifier(str(tmp_path / "no.bin"), ("en",), 0.5), "no.bin: not a fastText model"),
    ):
        with pytest.raises(BadInput, match=message):
            classifier.check()
    for text in ("model", "model:en", "model:en:x", "model:en:1.5", "model::0.5", "model:a,,b:0.5"):
        with pytest.raises(BadInput, match=f"--classifier {text}: give FILE:LABELS:P"):
            Classifier.parse(text)


def test_model_cut_off_is_refused(model, tmp_path):
    """Inside its dictionary the library would read without end."""
    whole, path = Path(model).read_bytes(), tmp_path / "cut.bin"
    for size in (4, 70, 110, len(whole) // 2, len(whole) - 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match="ends early; the file was copied"):
            Classifier(str(path), ("en",), 0.5).check()


def test_end_of_a_quantized_model_is_found(tmp_path):
    matrix = struct.pack("<?2qi", True, 3, 4, 6) + bytes(6)
    matrix += struct.pack("<4i", 4, 2, 2, 2) + bytes(4 * 256 * 4) + bytes(3)
    matrix += struct.pack("<4i", 1, 1, 1, 1) + bytes(4 * 256)
    words = b"the\0" + bytes(9) + b"__label__en\0" + bytes(8) + b"\1"
    model = struct.pack("<2i28xi24x", fasttext_model.MAGIC, 12, fasttext_model.SUPERVISED)
    model += struct.pack("<3i2q", 2, 1, 1, 1, 1) + words
    model += bytes(8) + b"\1" + matrix + b"\0" + struct.pack("<2q", 1, 4) + bytes(16)
    path = tmp_path / "model.ftz"
    for size in (len(model), len(model) + 1):
        path.write_bytes(model[:size].ljust(size, b"\0"))
        assert classifiers._read_labels(str(path)) == ["en"]
    path.write_bytes(model[:-1])
    with pytest.raises(BadInput, match="ends early"):
        classifiers._read_labels(str(path))


def test_other_kinds_of_models(model, tmp_path):
    """Labels in a tree (hierarchical softmax) or independent (one against all) are probabilities; word vectors have none."""
    rng, data, loss = random.Random(4), Path(model).read_bytes(), classifiers.KIND - 4
    german, english = text("de", rng), text("en", rng)

    def changed(at, number):
        path = write(tmp_path / f"{at}-{number}.bin", data[:at] + struct.pack("<i", number) + data[at + 4 :])
        return Classifier(str(path), ("de",), 0.65)

    for number in (1, 4):
        changed(loss, number).check()
    assert changed(loss, 1).keeps(german) != changed(loss, 1).keeps(english)
    assert changed(loss, 4).keeps(german) and not changed(loss, 4).keeps(english)
    for number in (1, 2):
        with pytest.raises(
            BadInput, match=rf"{number}.bin: has word vectors; name a model that was trained to classify"
        ):
            changed(classifiers.KIND, number).check()


def test_labels_with_another_prefix(model, tmp_path):
    path = write(tmp_path / "other.bin", Path(model).read_bytes().replace(b"__label__", b"__other__"))
    classifier = Classifier(str(path), ("__other__en",), 0.65)
    classifier.check()
    assert classifier.keeps(text("en", random.Random(2)))


def test_build_drops_by_each_model(model, tmp_path):
    rng = random.Random(3)
    path = write(tmp_path / "a.txt", "\n".join(text("en" if i % 2 else "de", rng) for i in range(60)))
    keep = write(tmp_path / "keep.py", "def keep(text): return 'house' in text")
    options = {**OPTIONS, "text_documents": "line"}
    for _ in range(2):
        classifiers = (f"{model}:en,de:0.1", f"{model}:en:0.65")
        report = build_here(path, tmp_path / "out", tokenizer=OLD, classifier=classifiers, **options)
    assert report["dropped"]["reasons"] == {"classifier lid.bin": 30}
    assert report["corpora"]["input"]["dropped_while_reading"] == {"classifier lid.bin": 30}
    assert model in json.loads((tmp_path / "out" / "build.json").read_text())["options"]["digests"]
    options |= {"vocab_size": 36, "character_coverage": 1, "overwrite": True}
    for chosen in ({"classifier": f"{model}:en:0.65"}, {"filters": f"{keep}:keep"}):
        build_here(path, tmp_path / "new", **chosen, **options)
        tokens = Tokenizer.load(tmp_path / "new" / "tokenizer.model").tokens[5:]
        assert any("h" in token for token in tokens) and not any("k" in token for token in tokens)  # kamen


@pytest.mark.parametrize(("tokenizer", "times"), [({"tokenizer": OLD}, 1), ({"vocab_size": 36}, 2)])
def test_classifiers_see_cleaned_text_without_dropped_lines(tokenizer, times, model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Classifier, "keeps", lambda self, text: seen.append(text) or True)
    line = "The \xad&quot;house&quot; stands on a hill, and it was good to see how many of them came."
    path = write(tmp_path / "a.txt", f"Home | Contact\n{line}\n\n\n" * 9)
    options = {"text_documents": "blank-line", "dedup": "none", "filters": "min-line-words=5"}
    build_here(path, tmp_path / "out", classifier=f"{model}:en:0.5", **options, **tokenizer, **OPTIONS)
    assert set(seen) == {line.replace("\xad", "")} and len(seen) == 9 * times
