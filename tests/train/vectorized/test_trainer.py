"""Networks trained together end as they do when trained one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.errors import InputError, ModelError, TrainingStopped
from excite.runs import Run
from excite.train.config import parse_config
from excite.train.from_config import train, train_together
from excite.train.vectorized.stacked_modules import (
    StackedLayers,
    check_stack,
    side_by_side,
    stack_batches,
    stack_models,
)

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


def test_one_that_cannot_go_on_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from excite.train import from_config as training

    made = training.build_model

    def sabotaged(config: Any, data: Any) -> nn.Module:
        model = made(config, data)
        if config.seed == 1:
            with torch.no_grad():
                model[0].weight[0, 0, 0, 0] = float("nan")
        return model

    monkeypatch.setattr(training, "build_model", sabotaged)
    paths = [tmp_path / str(i) for i in range(3)]
    with pytest.raises(TrainingStopped, match="1 of 3 trainings stopped"):
        train_together([config(seed) for seed in range(3)], paths)
    found = [Run.open(path) for path in paths]
    assert [run.status for run in found] == ["done", "failed", "done"]
    for run in found:
        run.close()


def test_only_seeds_may_differ(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing but their seeds"):
        train_together([config(0), config(1, epochs=3)], [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(InputError, match="a folder for each"):
        train_together([config(0)], [])


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "shape", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (4,), "random numbers"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), "buffers"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (4,), "cannot be trained together"),
        (Transposed, (3, 4), "."),
    ],
)
def test_what_cannot_be_stacked_is_refused(make: Any, shape: tuple[int, ...], why: str) -> None:
    models = [make() for _ in range(3)]
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=why):
        check_stack(stack_models(models), models, torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same", dtype=torch.float64), (4, 9)),
        (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, dilation=2, bias=False, dtype=torch.float64), (2, 9, 8)),
        (lambda: nn.Conv3d(1, 2, 2, padding=1, dtype=torch.float64), (1, 4, 4, 4)),
        (lambda: nn.Linear(4, 3, dtype=torch.float64), (5, 6, 4)),
        (lambda: nn.Linear(4, 3, bias=False, dtype=torch.float64), (4,)),
    ],
)
def test_stacked_layers_in_float64(make: Any, shape: tuple[int, ...]) -> None:
    models = [make() for _ in range(4)]
    batches = [torch.randn(5, *shape, dtype=torch.float64) for _ in range(4)]
    expected = stack_batches([model(x) for model, x in zip(models, batches)])
    stacked = stack_models(models)
    with StackedLayers():
        torch.testing.assert_close(stacked(stack_batches(batches)), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # the networks move with the stack
        stacked.weight += 1  # type: ignore[operator]
    assert all(torch.equal(model.weight, stacked.weight[i]) for i, model in enumerate(models))  # type: ignore[index]


def test_weights_side_by_side_are_a_grouped_convolution_in_float64() -> None:
    weight = torch.randn(3, 4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 6, 9, 9, dtype=torch.float64)
    dense, grouped = F.conv2d(x, side_by_side(weight)), F.conv2d(x, weight.flatten(0, 1), groups=3)
    torch.testing.assert_close(dense, grouped, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (dense, grouped)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stacked_convolutions_on_a_gpu_in_float64() -> None:
    models = [nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64, device="cuda") for _ in range(4)]
    batches = [torch.randn(5, 2, 9, 9, dtype=torch.float64, device="cuda") for _ in range(4)]
    expected = stack_batches([model(x) for model, x in zip(models, batches)])
    with StackedLayers():
        torch.testing.assert_close(stack_models(models)(stack_batches(batches)), expected, rtol=1e-12, atol=1e-12)
