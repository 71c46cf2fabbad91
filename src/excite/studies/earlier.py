"""Numbers of training runs whose run folders are gone: taken from a numbers.json, where the settings are the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from excite.errors import InputError
from excite.jobs.job import Job
from excite.jobs.training_job import TrainingJob
from excite.studies.judging.numbers import read_results
from excite.studies.study import Study, VariantResult


@dataclass(frozen=True)
class EarlierNumbers:
    """Results of jobs that need not be run again.

    Args:
        results: The results, by variant and seed.
        versions: Versions and device that they were made with, as numbers.json has them.
    """

    results: Mapping[tuple[str, int], VariantResult] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, job: Job) -> VariantResult | None:
        """The result of a job, if there is one."""
        return self.results.get((job.variant, job.seed))


def fingerprint(job: Job) -> str:
    """A hash of the settings of a training and its measurement, without the device; empty for other jobs.

    Settings at their defaults are left out, so that a key which is added later changes nothing.
    """
    if not isinstance(job, TrainingJob):
        return ""
    text = job.config.model_dump_json(exclude={"device"}, exclude_defaults=True) + repr(job.measurement)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def take_earlier(study: Study, scale: str, jobs: Sequence[Job], file: str | os.PathLike[str] | None) -> EarlierNumbers:
    """Results of unfinished jobs that a numbers.json holds.

    Args:
        study: The study.
        scale: Name of its scale.
        jobs: All jobs of the study.
        file: A numbers.json, a published NAME.json, or the folder of one; None for no earlier numbers.

    Returns:
        Results of those jobs whose stored settings are the same as now.

    Raises:
        InputError: If the file has numbers of another study or scale, or the figures of the study cannot be drawn without run
            folders.
    """
    if file is None:
        return EarlierNumbers()
    if not getattr(study.method, "draws_from_numbers", False):
        raise InputError(f"numbers: the figures of {study.name} are drawn from its run folders, not from numbers alone")
    stored_scale, versions, results = read_results(study, file)
    if stored_scale != scale:
        raise InputError(f"numbers: {file} has those of scale {stored_scale!r}; expected {scale!r}")
    by_job = {(result.variant, result.seed): result for result in results}
    same = {}
    for job in jobs:
        result = by_job.get((job.variant, job.seed))
        if result is not None and result.settings and result.settings == fingerprint(job) and not job.finished():
            same[job.variant, job.seed] = result
    return EarlierNumbers(same, versions if same else {})
