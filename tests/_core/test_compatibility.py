"""Earlier import paths still work: the same module, with a warning that names the new one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import excite
from excite._core import compatibility
from excite._core.compatibility import MODULES


@pytest.mark.parametrize("old", sorted(MODULES))
def test_earlier_import_paths(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated: import {MODULES[old]} instead"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MODULES[old])
    assert module.__spec__.name == module.__name__ == MODULES[old]


def test_attributes_of_the_package():
    with pytest.warns(DeprecationWarning, match=r"excite\.fit"):
        sys.modules.pop("excite.fit", None)
        vars(excite).pop("fit", None)
        from excite import fit
    assert fit.ensemble is importlib.import_module("excite.train").ensemble


def test_no_second_copy_of_a_renamed_module():
    with pytest.raises(ModuleNotFoundError, match=r"excite\.fit is now excite\.train"):
        importlib.import_module("excite.fit.losses")


@pytest.mark.slow
def test_the_warning_points_at_the_caller(tmp_path):
    script = tmp_path / "old.py"
    script.write_text("import excite\nfrom excite.fit import ensemble\n")
    done = subprocess.run([sys.executable, "-W", "always", script], capture_output=True, text=True, check=True)
    assert "old.py:2: DeprecationWarning: excite.fit is deprecated" in done.stderr


def test_renamed_keywords_pass_on_with_a_warning() -> None:
    @compatibility.renamed_keywords(arms="variants")
    def run(name: str, *, variants: str | None = None) -> tuple[str, str | None]:
        return name, variants

    with pytest.warns(DeprecationWarning, match=r"run\(arms=...\) is deprecated: use variants"):
        assert run("x", arms="all") == ("x", "all")
    with pytest.raises(TypeError, match="both 'arms' and 'variants'"):
        run("x", arms="all", variants="all")


def test_renamed_attributes_and_names() -> None:
    class Study:
        variants = (1, 2)
        arms = compatibility.renamed_attribute("arms", "variants")

    with pytest.warns(DeprecationWarning, match="Study.variants"):
        assert Study().arms == (1, 2)
    get = compatibility.renamed_names(__name__, {"earlier": "test_renamed_keywords_pass_on_with_a_warning"})
    with pytest.warns(DeprecationWarning, match="earlier is deprecated"):
        assert get("earlier") is test_renamed_keywords_pass_on_with_a_warning
    with pytest.raises(AttributeError, match="nothing"):
        get("nothing")


def test_converted_keywords_pass_on_with_a_warning() -> None:
    @compatibility.converted_keywords(seconds=("minutes", lambda seconds: seconds / 60))
    def wait(minutes: float | None = None) -> float | None:
        return minutes

    with pytest.warns(DeprecationWarning, match=r"wait\(seconds=...\) is deprecated: use minutes"):
        assert wait(seconds=90) == 1.5
    assert wait(seconds=None) is None
    with pytest.raises(TypeError, match="'seconds' and another value for 'minutes'"):
        wait(minutes=2, seconds=3)


def test_earlier_command_line_options() -> None:
    with pytest.warns(DeprecationWarning, match="--arms is deprecated: use --variants"):
        assert compatibility.present_options(["study", "run", "--arms", "all"]) == ["study", "run", "--variants", "all"]
    with pytest.warns(DeprecationWarning, match="--gpus-per-job"):
        assert compatibility.present_options(["--gpus-per-task=0.5"]) == ["--gpus-per-job=0.5"]
