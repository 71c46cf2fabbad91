"""Text files for the tests of stores and copies."""

from pathlib import Path


def write(path: Path, text: str) -> Path:
    """Writes a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
