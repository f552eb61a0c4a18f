"""Options as manifests list them: one that came later leaves the accounts of builds before it as they are."""

import json
from pathlib import Path

from data_prep.filters.classifiers import Classifier
from data_prep.options import BuildOptions

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"


def test_later_options_are_not_listed_where_they_say_what_was_done_before():
    old = json.loads((OLD / "dataset" / "manifest.json").read_text())["options"]
    assert BuildOptions().listed(trained=False).keys() == old.keys()
    assert BuildOptions(nsp=False, cut="sentences").listed(trained=False).keys() == old.keys()
    assert BuildOptions(nsp=False).listed(trained=False)["cut"] == "words"


def test_listed_options_are_what_is_read_back_of_them():
    model = Classifier("m", ("en", "de"), 0.65)
    listed = BuildOptions(language=model, quality=model, seq_lens=(64, 128)).listed(trained=True)
    assert json.loads(json.dumps(listed)) == listed
    assert listed["language"]["labels"] == ["en", "de"] and listed["seq_lens"] == [64, 128]
