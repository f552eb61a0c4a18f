"""Options as manifests list them: one that came later leaves the accounts of builds before it as they are."""

import json
from pathlib import Path

from data_prep.options import BuildOptions

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"


def test_later_options_are_not_listed_where_they_say_what_was_done_before():
    old = json.loads((OLD / "dataset" / "manifest.json").read_text())["options"]
    assert BuildOptions().listed(trained=False).keys() == old.keys()
    assert BuildOptions(nsp=False, cut="sentences").listed(trained=False).keys() == old.keys()
    assert BuildOptions(nsp=False).listed(trained=False)["cut"] == "words"
