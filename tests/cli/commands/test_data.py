"""`excite data list` and `excite data fetch`"""


def test_the_list_names_data_sets_and_the_cache(excite, monkeypatch, tmp_path):
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "cache"))
    status, out, _ = excite("data", "list")
    assert status == 0
    assert "digits" in out
    assert "excite data fetch cifar10" in out
    assert f"cache: {tmp_path / 'cache'}" in out


def test_an_unknown_data_set_is_refused(excite, refused):
    refused("imagenet", "data", "fetch", "imagenet")
    assert excite("data", "fetch")[0] == 2
