"""Earlier import paths still work: the same module, with a warning that names the new one."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import excite
from excite import bounds, probes
from excite._core import compatibility
from excite._core.compatibility import MODULES
from excite.monitor import alerts


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


EARLIER = {
    "Above": (lambda: alerts.Above("loss/step", 2, looks=3), "measurements", 3),
    "Below": (lambda: alerts.Below("loss/step", 2, looks=3), "measurements", 3),
    "Fell": (lambda: alerts.Fell(share=0.5), "fraction", 0.5),
    "Fell, least": (lambda: alerts.Fell(least=2), "min_peak", 2),
    "SteeperWhileFlat": (lambda: alerts.SteeperWhileFlat(looks=7), "measurements", 7),
    "Budget": (lambda: probes.Budget(share=0.1), "fraction", 0.1),
    "Budget, most": (lambda: probes.Budget(0.1, most=5), "max_steps", 5),
    "Rank": (lambda: probes.Rank(most_rows=5), "max_rows", 5),
    "Trajectory": (lambda: probes.Trajectory(sandwich=3), "bounds_every", 3),
    "Trajectory, most": (lambda: probes.Trajectory(most=4), "max_samples", 4),
    "steadiness": (lambda: bounds.steadiness([3.0, 2.0, 1.0, 1.0], share=0.25), "phi", 1.0),
}


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_keywords_of_public_names(name: str) -> None:
    make, attribute, value = EARLIER[name]
    with pytest.warns(DeprecationWarning, match=name.partition(",")[0]):
        made = make()
    assert getattr(made, attribute) == value


def test_earlier_fields_are_readable() -> None:
    with pytest.warns(DeprecationWarning, match=r"Above.looks is deprecated: use Above.measurements"):
        assert alerts.Above("loss/step", 2, measurements=3).looks == 3
    with pytest.raises(TypeError, match="got both 'looks' and 'measurements'"):
        alerts.Above("loss/step", 2, looks=3, measurements=3)
