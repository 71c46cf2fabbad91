"""Networks trained together end as they do when trained one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from excite.runs import Run
from excite.train.config import parse_config
from excite.train.from_config import train, train_together

SMALL: dict[str, Any] = {
    "data": {"name": "digits", "classes": [8, 9], "train": 60, "test": 20},
    "model": {"name": "small-cnn"},
    "excitation": {"radius": 0.03, "stages": 2, "steps": 3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": 0.9},
    "epochs": 2,
    "batch": 20,
    "watch": False,
}


def config(seed: int, **changes: Any) -> Any:
    settings = {**SMALL, **changes, "seed": seed}
    settings["data"] = {**settings["data"], "seed": seed}
    return parse_config(settings)


def weights(run: Run) -> dict[str, Tensor]:
    return run.load_checkpoint()[1]["model"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"excitation": None},
        {"excitation": {"radius": 0.03, "layers": "input", "norm": "2", "bounds": [-1, 1]}},
        {"model": {"name": "mlp"}, "excitation": {"radius": {"1": 0.02, "5": 0.01}, "norm": "1"}},
        {"optimizer": {"name": "adam", "lr": 0.001}},
        {"batch": 25},  # a smaller last batch
        {"excitation": {"relative": 0.02}},  # one after the other
    ],
    ids=["excited", "plain", "input", "named layers", "adam", "odd batches", "relative"],
)
def test_together_as_one_by_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    configs = [config(seed, **changes) for seed in range(3)]
    together = train_together(configs, [tmp_path / f"t{i}" for i in range(3)])
    for i, run in enumerate(together):
        alone = train(configs[i], tmp_path / f"a{i}")
        assert run.status == "done"
        assert run.names() == alone.names()
        for (_, a), (_, b) in ((run.series(name), alone.series(name)) for name in run.names()):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)
        for name, value in weights(alone).items():
            torch.testing.assert_close(weights(run)[name], value, rtol=1e-3, atol=1e-4)
        alone.close()
        run.close()


def test_continues_where_it_stopped(tmp_path: Path) -> None:
    configs = [config(seed) for seed in range(2)]
    whole = train_together(configs, [tmp_path / f"w{i}" for i in range(2)])

    def stop(phase: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    paths = [tmp_path / f"r{i}" for i in range(2)]
    with pytest.raises(KeyboardInterrupt):
        train_together(configs, paths, progress=stop)
    for run, expected in zip(train_together(configs, paths), whole):
        assert all(torch.equal(value, weights(expected)[name]) for name, value in weights(run).items())
        assert run.series("loss/step")[0].tolist() == [1, 2, 3, 4, 5, 6]
        run.close()
        expected.close()
