"""The trainings of the demo."""

from __future__ import annotations

from pathlib import Path

from excite.studies.demo import VARIANTS, demo_jobs


def test_variants_of_a_seed_share_everything_but_the_excitation() -> None:
    jobs = demo_jobs(Path("out"), seeds=2, epochs=3)
    assert [(job.variant, job.seed) for job in jobs] == [(name, seed) for name in VARIANTS for seed in (0, 1)]
    assert len({job.folder for job in jobs}) == len(jobs)
    for job in jobs:
        first = next(other for other in jobs if other.seed == job.seed)
        assert job.config.model_copy(update={"excitation": None}) == first.config
