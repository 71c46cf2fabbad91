"""Study `digits-auto`: the demo's task."""

from __future__ import annotations

from excite.studies.beyond.digits_auto import SCALES, STUDY, variants
from excite.studies.demo import CLASSES, RADIUS, demo_jobs
from excite.train.config import parse_config


def test_the_task_is_that_of_the_demo(tmp_path) -> None:
    demo = demo_jobs(tmp_path, seeds=1, epochs=100)[0].config
    for variant in variants(SCALES["quick"]):
        config = parse_config({**variant.config, "seed": 0})
        assert (config.data.name, config.data.classes) == ("digits", list(CLASSES))
        assert (config.model, config.optimizer, config.batch) == (demo.model, demo.optimizer, demo.batch)
    assert str(RADIUS) in STUDY.notes[0]
