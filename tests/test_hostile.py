"""Hostile calls of the public API (`benchmarks.hostile`): each ends in a finite answer or in one line that says what to do."""

from __future__ import annotations

import importlib
import math

import pytest
from benchmarks.hostile import CALLS, LIMIT, Outcome, hostile_call, numbers, outcomes, valid_call

from excite.errors import ExciteError

PACKAGES = [
    "excite", "excite.report.audit", "excite.bounds", "excite.data", "excite.excitation", "excite.train", "excite.lipschitz", "excite.margin",
    "excite.probes", "excite.report", "excite.runs", "excite.studies", "excite.wiring",
]  # fmt: skip
# Calls whose valid arguments name something that does not exist: a run, a study's scale, a download.
NOT_THERE = (
    "load_run",
    "data.fetch",
    "report.make_report",
    "studies.run",
    "studies.judge_again",
    "studies.plan_seeds",
    "runs.read_checkpoint",
    "runs.repair",
    "Run.open",
)
RESULTS = {  # returned by what is in the table, and not made by users
    "Alignments", "Assumption", "Audit", "Between", "BiasTrajectory", "Bound", "Checkpoint", "Consistent", "FlowResult", "Covering", "Cut", "Dataset",
    "Attention", "Decomposition", "DropoutRun", "DropoutStatement", "EmptyRegions", "Ensemble", "FromEmbeddings", "Equivalence", "Evidence", "TrainingResult", "Gap", "Group", "Projection",
    "JunctionAlignment", "Largest", "Layer", "LayerAlignment", "LayerRichness", "LawCount", "Ledger", "LedgerEntry", "LedgerReport", "LipschitzBound", "MostActive", "PathCount", "PiecewiseLinear", "Problem",
    "Processes", "RegionMap", "Repair", "Report", "Richness", "RobustAccuracy", "Segments", "Sharpness", "Site", "Smallest", "SmoothedMargins", "Spectrum", "Steadiness",
    "StudyResult", "Unit", "Units", "Updates", "Verdict", "Translation", "Watch", "Wiring",
}  # fmt: skip
REASONS = {
    **dict.fromkeys(RESULTS, "a result"),
    **dict.fromkeys(
        ("DataError", "ExciteError", "InputError", "ModelError", "RunError", "TrainingStopped"), "an error"
    ),
    **dict.fromkeys(
        ("bounds", "excitation", "integrations", "jobs", "lipschitz", "margin", "monitor", "studies"), "a module"
    ),
    **dict.fromkeys(("ARCHITECTURES", "BUILT_IN", "DOWNLOADED", "NAMES", "STUDIES", "__version__"), "a constant"),
    **dict.fromkeys(("StepContext", "Probe", "Schedule"), "what probes of one's own build on"),
    **dict.fromkeys(
        ("Arm", "Claim", "Scale", "Study", "Variant", "VariantResult", "experiment"), "what studies are written with"
    ),
    **dict.fromkeys(
        ("load_config", "load_trained", "train", "train_across", "train_together"),
        "takes a config or a run, which tests/train/test_config.py and tests/runs damage",
    ),
    "PowersOfTwo": "takes no arguments",
}


def _bad(calls: int, seed: int) -> list[Outcome]:
    return [one for one in outcomes(calls, seed) if not one.good]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_called_or_has_a_reason_not_to(package):
    called = {part for name in CALLS for part in name.split(" ")[0].split(".")}
    missing = [name for name in importlib.import_module(package).__all__ if name not in called and name not in REASONS]
    assert not missing, "add them to benchmarks/hostile_calls.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_THERE])
def test_valid_arguments_give_an_answer(name):
    answer = valid_call(name)
    assert CALLS[name].trains or not any(math.isnan(value) for value in numbers(answer))


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_is_not_there_is_refused(name):
    with pytest.raises(ExciteError):
        valid_call(name)


def test_a_call_depends_on_its_number_and_seed_alone():
    assert hostile_call("trace", 3, 5).result == hostile_call("trace", 3, 5).result
    assert LIMIT <= 20


@pytest.mark.slow
def test_hostile_calls_end_well():
    assert not _bad(8 * len(CALLS), seed=0)


@pytest.mark.slow
def test_many_hostile_calls_end_well():
    assert not _bad(60 * len(CALLS), seed=1)
