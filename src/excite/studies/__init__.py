"""Experiments of the papers as commands, each with its claims and an honest verdict."""

from excite.studies.runner import STUDIES, StudyResult, run
from excite.studies.study import Arm, Claim, Scale, Study
from excite.studies.verdicts import Verdict

__all__ = ["STUDIES", "Arm", "Claim", "Scale", "Study", "StudyResult", "Verdict", "run"]
