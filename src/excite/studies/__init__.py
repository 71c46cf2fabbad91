"""Experiments of the papers as commands, each with its claims and their verdicts."""

from excite._core.compatibility import renamed_names
from excite.studies.experiment import experiment
from excite.studies.find import find_study
from excite.studies.judging.numbers import judge_again
from excite.studies.judging.plan import plan_seeds
from excite.studies.judging.verdicts import Verdict
from excite.studies.registry import STUDIES
from excite.studies.runner import StudyResult, run
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

__all__ = [
    "STUDIES",
    "Claim",
    "Scale",
    "Study",
    "StudyResult",
    "Variant",
    "VariantResult",
    "Verdict",
    "experiment",
    "find_study",
    "judge_again",
    "plan_seeds",
    "run",
]

__getattr__ = renamed_names(__name__, {"Arm": "Variant"})
