"""Files are written whole or not at all."""

import pytest

from excite._core.files import read_json, remove_temporary, write_bytes, write_json
from excite.errors import RunError


def test_json_is_written_and_read(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, 2.5, None]})
    assert read_json(path) == {"a": [1, 2.5, None]}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_content_is_replaced_and_temporary_files_are_removed(tmp_path):
    path = tmp_path / "b"
    write_bytes(path, b"first")
    write_bytes(path, b"second")
    assert path.read_bytes() == b"second"
    remove_temporary(tmp_path)
    assert path.exists()


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("{")
    with pytest.raises((RunError, ValueError)):
        read_json(path)
