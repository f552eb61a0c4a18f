"""Lines of a run's logs that a kill cut are left out."""

from pathlib import Path

from megabert.common.run_files import json_lines


def test_partial_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "a": 2}\n{"st\n[3]\n{"a": 4}\n{"step": 5}\n{"step": 6, "text": "\xc3')
    assert list(json_lines(log)) == [{"step": 1, "a": 2}, {"step": 5}]
    assert list(json_lines(tmp_path / "none")) == []
