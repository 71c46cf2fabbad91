"""Studies are found by name, figure, path and entry point; near misses are suggested, never run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from excite import studies
from excite.errors import InputError
from excite.studies import Claim, Study, experiment
from excite.studies.find import all_studies, check_study, find_study

SOURCE = """
from excite.studies import experiment

def double(settings, seed):
    return {"value": 2 * settings["a"] + seed}

STUDY = experiment(%r, "Twice", double, {"one": {"a": 1}}, [], measures={"value": "the value"})
"""


@pytest.fixture(autouse=True)
def clean_imports():
    """Undoes imports of files, which a command ends with."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


def written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text)
    return file


def test_by_name_and_by_figure() -> None:
    assert find_study("margin-layers").name == "margin-layers"
    assert find_study("persistency:6").name == "margin-layers"
    assert find_study("richness:fig 2").name == "margin-layers"
    assert find_study("trajectory:3c").name == "corruption"
    assert find_study("invariances:Theorem 1").name == "conservation"
    study = studies.STUDIES["boundaries"]
    assert find_study(study) is study


@pytest.mark.parametrize("reference", ["persistency:6", "persistency 6", "persistency figure 6", "Persistency fig. 6"])
def test_a_figure_is_written_in_several_ways(reference: str) -> None:
    assert find_study(reference).name == "margin-layers"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("margin-layer", "did you mean 'margin-layers'\\?"),
        ("margin_layers", "did you mean 'margin-layers'\\?"),
        ("margin", "did you mean 'margin-losses' or 'margin-radii' or 'margin-layers' or 'margin-auto'\\?"),
        ("frequecny", "did you mean 'frequency'"),
        ("reveals:2", "2 studies, choose one: frequency .*, corruption"),
        ("invariances:theorem 2", "choose one: low-rank .*, reduced-alignment"),
        ("persistency:3", "no study remakes figure 3 .*; there are figs 1, 2, 4-6"),
        ("figure 6", "of which paper\\? persistency:6 or reveals:6"),
        ("10", "of which paper\\? reveals:10"),
        ("richness", "is a paper: name a figure of it, such as richness:2, or one of its studies: margin-layers, hidden-rank"),
        ("quantum", "expected one of margin-losses.*PAPER:FIGURE, or the path of a file"),
        ("", "expected one of"),
    ],
)  # fmt: skip
def test_near_misses_are_suggested(reference: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_study(reference)


def test_a_file_is_a_study(tmp_path: Path) -> None:
    file = written(tmp_path / "mine", "own_twice.py", SOURCE % "twice")
    study = find_study(str(file))
    assert (study.name, study.origin) == ("twice", str(file))
    assert find_study(file) == study  # a second time: the file is not run again
    assert "own_twice" in sys.modules  # worker processes import it by this name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own_none.py", "x = 1\n", "own_none.py defines no study: expected `STUDY = Study"),
        ("own_else.py", "STUDY = 3\n", "defines no study"),
        ("own_syntax.py", "x = 1\nSTUDY = (\n", "own_syntax.py, line 2: SyntaxError"),
        ("own_raises.py", "x = 1\n\nraise ValueError('no\\nluck')\n", "own_raises.py, line 3: ValueError: no luck"),
        ("own_taken.py", SOURCE % "boundaries", "the name 'boundaries' is that of a study of Excite"),
        ("own_name.py", SOURCE % "My Study", "expected a name of lower-case letters"),
        ("own-hyphen.py", SOURCE % "twice", "expected a file name that Python can import"),
        ("json.py", SOURCE % "twice", "another module named 'json'; rename the file"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(InputError, match=message):
        find_study(str(written(tmp_path, name, text)))
    if "defines" not in message and "name" not in message:
        assert sys.path == before


def test_a_missing_file_is_suggested(tmp_path: Path) -> None:
    written(tmp_path, "own_study.py", "")
    with pytest.raises(InputError, match=r"does not exist: did you mean '.*own_study\.py'"):
        find_study(tmp_path / "own_studdy.py")


def test_claims_on_missing_variants_are_refused_before_running() -> None:
    claim = Claim("more", "nowhere", "b minus a", ("a", "b"), lambda n: 0.0, above=0.0)
    study = experiment("pair", "A pair", lambda settings, seed: {}, {"a": {}}, [claim], measures={"value": "value"})
    with pytest.raises(InputError, match="claim 'more' names b; expected some of a"):
        check_study(study, "my file")
    with pytest.raises(InputError, match="names b"):
        studies.run(study)
    same = experiment("pair", "A pair", lambda s, k: {}, {"a b": {}, "a-b": {}}, [], measures={"value": "value"})
    with pytest.raises(InputError, match="variants with different names"):
        check_study(same, "my file")


def installed(folder: Path, entries: str) -> None:
    info = folder / "someones_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[excite.studies]\n{entries}")


def test_studies_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excite_list) -> None:
    written(tmp_path, "own_plugin.py", SOURCE % "twice")
    installed(
        tmp_path, "twice = own_plugin:STUDY\nagain = own_plugin\nlost = own_nowhere:STUDY\nnumber = own_plugin:double\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found, broken = all_studies()
    assert isinstance(found["twice"], Study)
    assert find_study("twice").name == "twice"
    assert set(broken) == {"again", "lost", "number"}
    assert "is named 'twice': expected the entry point's name" in broken["again"]
    assert "cannot be imported: ModuleNotFoundError" in broken["lost"]
    assert "is no study" in broken["number"]
    with pytest.raises(InputError, match="cannot be imported"):
        find_study("lost")
    out = excite_list()
    assert "\ntwice " in out
    assert "twice" in out
    assert "not listed: lost: study 'lost'" in out


@pytest.fixture
def excite_list(capsys, monkeypatch):
    def call() -> str:
        from excite.cli.commands.study import study_list

        study_list()
        return str(capsys.readouterr().out)

    return call
