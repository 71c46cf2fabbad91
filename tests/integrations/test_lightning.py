"""The Lightning callback and mix-in in real trainings on a tiny model."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import excite
from excite import InputError
from excite.margin import Margins
from excite.probes import Loss

warnings.filterwarnings("ignore", category=DeprecationWarning)
L = pytest.importorskip("lightning.pytorch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

from excite.integrations.lightning import LightningCallback, PersistentlyExcited  # noqa: E402
from models import same_state, state_of  # noqa: E402


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def data(batch=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, :1] > 0).float()), batch_size=batch)


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.fail_at = None

    def training_step(self, batch, batch_idx):
        if self.fail_at == self.global_step:
            raise ZeroDivisionError("mine")
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(tmp_path, callbacks, epochs=3, **options):
    options = {"logger": False, "enable_checkpointing": False, **options}
    return L.Trainer(
        max_epochs=epochs, callbacks=callbacks, default_root_dir=tmp_path, accelerator="cpu", devices=1,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def by_hand(batch=8, parts=1):
    """The same training in a plain loop: losses and weights of every step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, weights = [], [[p.detach().clone() for p in model.parameters()]]
    for _ in range(3):
        batches = list(data(batch))
        for start in range(0, len(batches), parts):
            optimizer.zero_grad()
            group = batches[start : start + parts]
            losses.append(0.0)
            for x, y in group:
                loss = (model(x) - y).square().mean() / len(group)
                loss.backward()
                losses[-1] += loss.item()
            optimizer.step()
            weights.append([p.detach().clone() for p in model.parameters()])
    return losses, weights


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_numbers_are_those_of_the_same_loop_by_hand(tmp_path, parts):
    model = Plain()
    before = state_of(model)["hooks"]
    callback = LightningCallback(tmp_path / "run", every={"distance": 1, "trajectory": 1})
    trainer(tmp_path, [callback], accumulate_grad_batches=parts).fit(model, data())
    losses, weights = by_hand(parts=parts)
    run = excite.load_run(tmp_path / "run")
    assert run.status == "done"
    steps, values = run.series("loss/step")
    assert steps.tolist() == list(range(1, len(losses) + 1))
    assert values.tolist() == pytest.approx(losses, rel=1e-6)
    moved = [sum((a - b).square().sum() for a, b in zip(now, weights[0])).sqrt().item() for now in weights]
    assert run.series("distance/absolute")[1].tolist() == pytest.approx(moved, rel=1e-5)
    assert {"trajectory/mean/0", "rank/effective/2", "signs/changed"} <= set(run.names())
    assert any(name.startswith("conservation/drift/") for name in run.names())
    assert state_of(model)["hooks"] == before


def test_an_exception_detaches_and_the_run_says_so(tmp_path):
    model = Plain()
    model.fail_at = 5
    before = state_of(model.net)["hooks"]
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, [LightningCallback(tmp_path / "run")]).fit(model, data())
    run = excite.load_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.reason == "mine"
    assert len(run.series("loss/step")[0]) == 5
    assert state_of(model.net)["hooks"] == before


@pytest.mark.slow
def test_a_checkpoint_continues_the_run(tmp_path):
    first = trainer(tmp_path, [LightningCallback(tmp_path / "run")], epochs=2, enable_checkpointing=True)
    first.fit(Plain(), data())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    second = trainer(tmp_path, [LightningCallback(tmp_path / "run")], epochs=3)
    second.fit(Plain(), data(), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    losses, _ = by_hand()
    run = excite.load_run(tmp_path / "run")
    assert run.series("loss/step")[1].tolist() == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_the_trainers_own_loggers_get_the_values(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "logs")
    trainer(tmp_path, [LightningCallback()], epochs=1, logger=logger).fit(Plain(), data())
    run = excite.load_run(f"{logger.log_dir}/excite")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [one.step for one in events.Scalars("excite/loss/step")] == run.series("loss/step")[0].tolist()


class Robust(PersistentlyExcited, Plain):
    def __init__(self, radius=0.1):
        super().__init__()
        self.excite(self.net, radius=radius)


@pytest.mark.slow
def test_the_mix_in_trains_with_the_excited_loss(tmp_path):
    radius = excite.Stages(0.1, 3)
    model = Robust(radius)
    trainer(tmp_path, [LightningCallback(tmp_path / "run")]).fit(model, data())
    ours = network()
    pe = excite.PersistentExcitation(ours, excite.Stages(0.1, 3))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    losses = []
    for epoch in range(3):
        pe.advance(epoch / 3)
        for x, y in data():
            optimizer.zero_grad()
            loss = pe.loss(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert same_state(state_of(ours), state_of(model.net))
    assert excite.load_run(tmp_path / "run").series("loss/step")[1].tolist() == pytest.approx(losses, rel=1e-6)


@pytest.mark.slow
def test_what_to_watch_is_asked_for_where_it_is_not_clear(tmp_path):
    class Two(Plain):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(3, 1)

    with pytest.raises(InputError, match=r"no forward and 2 children with weights: pass the module.*module='net'"):
        trainer(tmp_path, [LightningCallback(tmp_path / "run")]).fit(Two(), data())
    trainer(tmp_path, [LightningCallback(tmp_path / "run", module="net")], epochs=1).fit(Two(), data())
    with pytest.raises(InputError, match="has no module 'nett'"):
        trainer(tmp_path, [LightningCallback(tmp_path / "other", module="nett")]).fit(Two(), data())


class Logging(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=True)
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/error", torch.tensor(float(self.global_step)))


@pytest.mark.parametrize("logger", [False, True])
def test_what_the_module_logs_arrives_in_the_run(tmp_path, logger):
    callback = LightningCallback(tmp_path / "run", alerts=[], probes=[excite.probes.Loss()])
    loggers = [L.loggers.CSVLogger(tmp_path)] if logger else False
    fit = trainer(tmp_path, [callback], logger=loggers, log_every_n_steps=2)
    fit.fit(Logging(), data(), data())
    run = excite.load_run(tmp_path / "run")
    losses = run.series("loss/step")[1]
    steps, values = run.series("train_loss_step")
    assert steps.tolist() == [2, 4, 6, 8, 10, 12]
    assert values.tolist() == pytest.approx(losses[1::2].tolist())
    steps, values = run.series("train_loss_epoch")
    assert steps.tolist() == [4, 8, 12]
    assert values.tolist() == pytest.approx(losses.reshape(3, 4).mean(1).tolist())
    assert [one.tolist() for one in run.series("val/error")] == [[4, 8, 12], [4, 8, 12]]
    assert run.series("lightning/loss")[1].tolist() == pytest.approx(losses[1::2].tolist())


class WithValidation(Plain):
    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.slow
def test_margins_of_the_trainers_loaders_are_in_the_run(tmp_path, capsys):
    trainer(tmp_path, [LightningCallback(tmp_path / "run")], epochs=2).fit(WithValidation(), data(), data(5))
    run = excite.load_run(tmp_path / "run")
    steps, medians = run.series("margin_gap/median/test")
    assert (steps[0], steps[-1]) == (0, 8)  # between, as often as there is time for
    assert run.series("margin_gap/accuracy/train")[1][-1] > 0.5
    assert len(run.read_json("margins-inf-train")["values"]) == 32
    assert run.read_json("summary")["accuracy"].keys() == {"train", "test"}
    assert medians[-1] == pytest.approx(float(Margins.from_dict(run.read_json("margins-inf-test")).median))
    assert "margins at the end: 32 training points" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"train": None}, {"probes": [Loss()]}])
def test_margins_can_be_left_out(tmp_path, options):
    trainer(tmp_path, [LightningCallback(tmp_path / "run", **options)], epochs=1).fit(Plain(), data())
    assert not [name for name in excite.load_run(tmp_path / "run").names() if name.startswith("margin_gap/")]


def test_data_without_margins_are_named_once_in_training(tmp_path):
    x = torch.randn(32, 3)
    pairs = DataLoader(TensorDataset(x, x, x[:, :1]), batch_size=8)

    class Three(Plain):
        def training_step(self, batch, batch_idx):
            return (self.net(batch[0]) - batch[2]).square().mean()

    with pytest.warns(UserWarning, match="margins of the training and test data are not measured: train: expected"):
        trainer(tmp_path, [LightningCallback(tmp_path / "run")], epochs=1).fit(Three(), pairs)
    with pytest.warns(UserWarning, match="'margin_gap' is switched off.*regression targets have no margin"):
        targets = DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)
        trainer(tmp_path, [LightningCallback(tmp_path / "second")], epochs=1).fit(Plain(), targets)
    assert len(excite.load_run(tmp_path / "second").series("loss/step")[0]) == 4


class Recorded(Plain):
    def __init__(self, lr=0.1, widths=(8, 4), loss=None):
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("given", [{}, {"config": {"mine": 1}}])
def test_hyperparameters_are_the_config_of_the_run(tmp_path, given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning on a module among the hyperparameters
        module = Recorded(lr=0.2, loss=nn.MSELoss())
    trainer(tmp_path, [LightningCallback(tmp_path / "run", probes=[Loss()], **given)], epochs=1).fit(module, data())
    expected = {"lr": 0.2, "widths": [8, 4]}  # no text of a module
    assert excite.load_run(tmp_path / "run").config["config"] == given.get("config", expected)


def test_a_module_without_hyperparameters_has_no_config(tmp_path):
    trainer(tmp_path, [LightningCallback(tmp_path / "run", probes=[Loss()])], epochs=1).fit(Plain(), data())
    assert "config" not in excite.load_run(tmp_path / "run").config


def test_the_earlier_name_of_the_callback():
    from excite.integrations import lightning

    with pytest.warns(
        DeprecationWarning, match="ExciteCallback is deprecated: use excite.integrations.lightning.Light"
    ):
        assert lightning.ExciteCallback is LightningCallback
    assert LightningCallback().state_key == "ExciteCallback"  # in checkpoints written before
