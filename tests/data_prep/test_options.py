"""Options as manifests list them."""

import json

from data_prep.filters.classifiers import Classifier
from data_prep.options import BuildOptions


def test_listed_options_are_what_is_read_back_of_them():
    model = Classifier("m", ("en", "de"), 0.65)
    listed = BuildOptions(language=model, quality=model, seq_lens=(64, 128)).listed(trained=True)
    assert json.loads(json.dumps(listed)) == listed
    assert listed["language"]["labels"] == ["en", "de"] and listed["seq_lens"] == [64, 128]
