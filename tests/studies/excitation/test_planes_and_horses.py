"""The task of the papers' experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from excite import studies
from excite.studies import runner


@pytest.mark.parametrize("name", [name for name in studies.STUDIES if name.startswith("margin-")])
def test_scale_paper_is_what_the_authors_did(name: str, tmp_path: Path) -> None:
    study = studies.STUDIES[name]
    todo = runner.plan_jobs(study, study.scales["paper"], 10, tmp_path, extra=True)
    assert {task.seed for task in todo} == set(range(10))
    for task in todo:
        config = task.config
        assert (config.epochs, config.model.name, config.data.classes) == (40, "papers-cnn", ["airplane", "horse"])
        if config.loss == "cross-entropy":
            assert (config.batch, config.optimizer.lr) == (1, 1e-3)
            assert config.optimizer.model_dump()["dampening"] == 0
        elif task.variant != "adaptive optimizer":
            optimizer = config.optimizer.model_dump()
            assert (config.batch, *(optimizer[k] for k in ("lr", "momentum", "dampening"))) == (50, 0.1, 0.9, 0.9)
        if config.excitation is not None and config.excitation.radius != "auto":
            assert (config.excitation.steps, config.excitation.stages, config.excitation.norm) == (4, 4, "inf")


def test_hidden_layers_are_all_but_the_first() -> None:
    from excite.studies.excitation.planes_and_horses import HIDDEN
    from excite.train import build
    from excite.wiring import trace

    names = [layer.name for layer in trace(build("papers-cnn"), torch.zeros(2, 3, 32, 32)).layers]
    assert names[1:] == HIDDEN
