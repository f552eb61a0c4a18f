"""Programs that stand for those of another machine."""

from pathlib import Path


def write(file: Path, source: str) -> Path:
    """A script that can be run, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    file.chmod(0o755)
    return file
