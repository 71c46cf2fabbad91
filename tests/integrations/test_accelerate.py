"""AcceleratedWatch in real loops with an Accelerator: steps, losses, checkpoints, trackers."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import excite
from excite import InputError
from models import state_of

accelerate = pytest.importorskip("accelerate")

from excite.integrations.accelerate import AcceleratedWatch  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerators of one process share their state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    x = torch.randn(20, 4)
    data = DataLoader(TensorDataset(x, x[:, 0]), batch_size=4)
    return x, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def train(accelerator, model, optimizer, loader, monitor=None, epochs=1):
    """The loss of every optimizer step, as the accelerator scales and adds those of its batches."""
    steps, total = [], 0.0
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x)[:, 0] - y).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                steps.append(total)
                total = 0.0
            if monitor is not None:
                monitor.step(loss)
    return steps


@pytest.mark.parametrize("accumulated", [1, 2])
def test_one_step_per_optimizer_step(tmp_path, accumulated):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    x, model, optimizer, loader = prepared(accelerator)
    before = state_of(model)["hooks"]
    with AcceleratedWatch(accelerator, model, tmp_path / "run", x, optimizer, every={"distance": 1}) as monitor:
        losses = train(accelerator, model, optimizer, loader, monitor)
        monitor.log({"val/error": 0.5}, lr=0.1)
    with excite.load_run(tmp_path / "run") as run:
        steps, values = run.series("loss/step")
        assert [one.tolist() for one in run.series("val/error")] == [[len(losses)], [0.5]]
        assert run.series("lr")[1].tolist() == [0.1]
        assert "conservation/drift" in {
            "/".join(name.split("/")[:2]) for name in run.names()
        }  # the optimizer was found
    assert len(steps) == len(losses) == {1: 5, 2: 3}[accumulated]  # the last of 5 batches stands alone
    assert values == pytest.approx(losses, rel=1e-6)
    assert state_of(model)["hooks"] == before


def test_weights_are_those_of_a_training_without(tmp_path):
    weights = []
    for watched in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        x, model, optimizer, loader = prepared(accelerator)
        monitor = AcceleratedWatch(accelerator, model, tmp_path / "run", x, optimizer) if watched else None
        train(accelerator, model, optimizer, loader, monitor)
        if monitor is not None:
            monitor.close()
            monitor.close()
            assert monitor.watch is None
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_a_restored_training_continues_its_run(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    x, model, optimizer, loader = prepared(accelerator)
    with AcceleratedWatch(accelerator, model, tmp_path / "run", x, optimizer) as monitor:
        first = train(accelerator, model, optimizer, loader, monitor)
        accelerator.save_state(str(tmp_path / "saved"))
        train(accelerator, model, optimizer, loader, monitor)  # steps after the checkpoint are replaced
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()

    accelerator = accelerate.Accelerator(cpu=True)
    x, model, optimizer, loader = prepared(accelerator)
    monitor = AcceleratedWatch(accelerator, model, tmp_path / "run", x, optimizer)
    accelerator.load_state(str(tmp_path / "saved"))
    with monitor:
        second = train(accelerator, model, optimizer, loader, monitor)
        with pytest.raises(InputError, match="before entering"):
            monitor.load_state_dict({})
    with excite.load_run(tmp_path / "run") as run:
        assert run.series("loss/step")[1] == pytest.approx(first + second, rel=1e-6)


def test_values_go_to_the_trackers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("logs")
    x, model, optimizer, loader = prepared(accelerator)
    with AcceleratedWatch(accelerator, model, example=x) as monitor:
        losses = train(accelerator, model, optimizer, loader, monitor)
    accelerator.end_training()
    with excite.load_run(tmp_path / "excite") as run:  # in the project folder by default
        assert len(run.series("loss/step")[0]) == len(losses)
    (events,) = (tmp_path / "logs").glob("events*")
    logged = EventAccumulator(str(events)).Reload().Scalars("excite/loss/step")
    assert [event.value for event in logged] == pytest.approx(losses, rel=1e-6)


def test_an_error_ends_the_run_as_failed(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    x, model, optimizer, _ = prepared(accelerator)
    with pytest.raises(RuntimeError), AcceleratedWatch(accelerator, model, tmp_path / "run", x, optimizer):
        raise RuntimeError("out of memory")
    with excite.load_run(tmp_path / "run") as run:
        assert run.status == "failed"
    with pytest.raises(InputError, match=r"accelerate\.Accelerator"):
        AcceleratedWatch(model, model)
