"""Two trees are measured in turn, their ratio is ours over the other's, and a slower one fails where a limit is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_revisions

FAKE = """
import json, os, sys
from pathlib import Path
log = Path(sys.argv[sys.argv.index("--log") + 1])
with log.open("a") as file:
    file.write("base\\n" if "base" in os.getcwd() else "ours\\n")
rate = RATE + len(log.read_text().splitlines()) % 2
tree = {"results": [{"rows_per_sec": {"ours, token, updates of 2048 rows": {"p50": rate}}}]}
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(tree))
"""


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base that does 200 rows a second, and ours, which does 190."""
    for name, rate in (("base", 200), ("ours", 190)):
        (tmp_path / name / "benchmarks").mkdir(parents=True)
        (tmp_path / name / "benchmarks/bench_data.py").write_text(FAKE.replace("RATE", str(rate)))
    (tmp_path / "log").touch()
    monkeypatch.setattr(bench_revisions, "ROOT", tmp_path / "ours")
    return tmp_path


def test_the_ratio_of_two_trees(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--base", str(trees / "base"), "--bench", "data", "--rounds", "3", "--json", str(trees / "r.json")]
    for within, code in ((["--within", "0.03"], 1), (["--within", "0.1"], 0), ([], 0)):
        assert bench_revisions.main([*options, *within, "--", "--log", str(trees / "log")]) == code
    order = (trees / "log").read_text().split()
    assert order[:6] == ["ours", "base", "base", "ours", "ours", "base"]
    found = json.loads((trees / "r.json").read_text())["figures"]["rows/s"]
    assert len(found["ratios"]) == 3 and found["ratio"] == pytest.approx(191 / 200)
    assert "0.945 to 0.955" in capsys.readouterr().out


def test_a_benchmark_that_fails_and_a_revision_that_is_none(trees: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_revisions.main(["--base", str(trees / "base"), "--bench", "step"]) == 2
    assert "bench_step.py" in capsys.readouterr().err
    assert bench_revisions.main(["--base", "no-such-revision", "--bench", "data"]) == 2
    assert "no-such-revision" in capsys.readouterr().err


def test_operations_are_compared_one_by_one_where_both_trees_have_them() -> None:
    def measured(**seconds: float) -> dict[str, float]:
        results = [
            {"op": op, "size": "8 x 4", "what": "forward", "seconds": {"ours": {"p50": s}, "torch": {"p50": 9}}}
            for op, s in seconds.items()
        ]
        return bench_revisions.RATES["ops"]({"results": results})

    base = [measured(layer=0.5, mlm_loss=1.0), measured(layer=0.5, mlm_loss=2.0)]
    found = bench_revisions.compare(base, [measured(layer=0.25, other=1.0), measured(layer=1.0, other=1.0)])
    assert list(found) == ["layer 8 x 4, ours, calls/s"]
    assert found["layer 8 x 4, ours, calls/s"]["ratios"] == [2.0, 0.5]
