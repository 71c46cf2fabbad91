"""Margins of training and test data in `excite.watch`: what is measured, stored and left as it was."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import excite
from excite import InputError
from excite.margin import Margins
from excite.monitor.live_margins import LiveMargins, pixel_bounds
from excite.monitor.points import Points
from excite.monitor.results import read_points
from excite.probes import Every, Loss, PowersOfTwo
from models import same_state, state_of


def data(count=40, classes=3):
    generator = torch.Generator().manual_seed(count)
    x = torch.rand(count, 1, 4, 4, generator=generator)
    return x, (x[:, 0, 0].sum(1) * classes / 4).long().clamp(0, classes - 1)


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, outputs))


def train(model, watch, loader, steps, optimizer):
    losses = []
    while len(losses) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if watch is not None:
                watch.step(loss)
            if len(losses) == steps:
                break
    return losses


@pytest.mark.slow
def test_data_alone_are_a_full_watch_and_training_is_bit_equal(tmp_path, capsys):
    results = []
    for watched in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(1)
        loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)
        if watched:
            with excite.watch(model, run=tmp_path / "run", optimizer=optimizer, train=loader, test=data(30)) as watch:
                watch.probes[-1].schedule = Every(4)
                losses = train(model, watch, loader, 7, optimizer)
        else:
            losses = train(model, None, loader, 7, optimizer)
        results.append((losses, state_of(model), torch.get_rng_state()))
    assert results[0][0] == results[1][0]
    assert same_state(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])
    run = excite.load_run(tmp_path / "run")
    assert run.series("margin_gap/gap")[0].tolist() == [0, 4, 7]
    assert run.series("rank/effective/4")[0].tolist() == [0, 7]  # the example is taken from the data; also at the end
    margins = Margins.from_dict(run.read_json("margins-inf-test"))
    assert (len(margins), margins.unit.high, margins.evidence is not None) == (30, 1.0, True)
    assert run.series("margin_gap/median/test")[1][-1] == pytest.approx(margins.median)
    assert run.read_json("summary")["points"] == {"train": 40, "test": 30}
    assert run.config["watch"]["margins"] == {
        "bounds": [0.0, 1.0], "normalize": None, "threshold": 0.5, "unit": {"low": 0.0, "high": 1.0, "pixels": True},
    }  # fmt: skip
    stored = read_points(tmp_path / "run")
    assert stored.data["train"][0].shape == (40, 1, 4, 4)
    assert stored.settings["bounds"] == [0.0, 1.0]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in said] == [
        "margins at the start", "measuring margins at the end", "margins at the end",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_resumed_training_continues_from_the_perturbations(tmp_path):
    def watched(folder):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        watch = excite.watch(
            model, run=folder, optimizer=optimizer, train=data(), test=data(30), every={"margin_gap": 2}
        )
        return model, optimizer, watch

    model, optimizer, watch = watched(tmp_path / "first")
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    with watch:
        train(model, watch, loader, 4, optimizer)
        state = watch.state_dict()
    again, _, second = watched(tmp_path / "second")
    with second:
        again.load_state_dict(model.state_dict())
        second.load_state_dict(state)
        found = second.probes[-1].state_dict()["found"]
        assert second.steps == 4
        assert torch.equal(found["train"], state["probes"]["margin_gap"]["found"]["train"])


def test_nothing_is_measured_at_the_end_after_an_exception(tmp_path):
    model = network()
    with (
        pytest.raises(ZeroDivisionError),
        excite.watch(model, run=tmp_path / "run", train=data(), alerts=[], every={"margin_gap": 9}) as watch,
    ):
        watch.step(1.0)
        raise ZeroDivisionError("mine")
    run = excite.load_run(tmp_path / "run")
    assert run.series("margin_gap/median/train")[0].tolist() == [0]
    assert not (run.path / "artifacts" / "summary.json").exists()


def test_a_probe_measured_at_the_last_step_is_not_measured_twice(tmp_path):
    calls = []

    class Counting(Loss):
        name = "counting"

        def measure(self, ctx):
            calls.append((ctx.step, ctx.final))
            return {}

    with excite.watch(network(), probes=[Counting(PowersOfTwo())]) as watch:
        for _ in range(4):
            watch.step(1.0)
    with excite.watch(network(), probes=[Counting(PowersOfTwo())]) as watch:
        for _ in range(3):
            watch.step(1.0)
    with excite.watch(network(), probes=[Counting(PowersOfTwo())]):
        pass
    assert calls == [
        (0, False),
        (1, False),
        (2, False),
        (4, False),
        (0, False),
        (1, False),
        (2, False),
        (3, True),
        (0, False),
    ]


@pytest.mark.slow
def test_binary_models_decide_by_the_threshold(tmp_path):
    model = network(1)
    x, _ = data()
    with torch.no_grad():
        y = (model.eval()(x)[:, 0] > 0).float()
    with excite.watch(model, run=tmp_path / "run", train=(x, y), threshold=0) as watch:
        watch.step(0.5)
    assert excite.load_run(tmp_path / "run").series("margin_gap/accuracy/train")[1][[0, -1]].tolist() == [1, 1]


@pytest.mark.slow
def test_lines_can_be_silenced(capsys):
    log = logging.getLogger("excite")
    log.setLevel(logging.WARNING)
    try:
        with excite.watch(network(), train=data()) as watch:
            watch.step(1.0)
    finally:
        log.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"train": (pair for pair in zip(*data()))}, "can be read only once"),
        ({"train": data()[0]}, "expected a pair of tensors"),
        ({"normalize": (0.5, 0.5)}, "give train=, test= or both"),
        ({"train": data(), "test": (torch.zeros(3, 16), torch.zeros(3))}, "one shape"),
        ({"train": (data()[0] / 0, data()[1])}, "expected finite train inputs"),
        ({"train": data(), "bounds": (1, 0)}, "train: expected bounds with lowest"),
        ({"train": data(), "bounds": (float("nan"), 1)}, "train: expected bounds with lowest"),
        ({"train": data(), "bounds": 1}, "train: expected bounds as"),
        ({"train": data(), "bounds": "01"}, "train: expected bounds as"),
        ({"test": data(), "bounds": (0, 1e-3)}, "test: expected inputs within the bounds"),
        ({"test": data(), "normalize": (0.0, 1e3)}, "test: expected inputs within the bounds"),
        ({"train": data(), "normalize": (0.5, 0)}, "std above 0"),
        ({"train": data(), "normalize": 0.5}, r"expected \(mean, std\)"),
    ],
)
def test_bad_data_are_refused_before_anything_is_written(tmp_path, options, match):
    with pytest.raises(InputError, match=match):
        excite.watch(network(), run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "pair", "match"),
    [
        (
            nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 2)),
            (torch.ones(4, 2).long(), torch.ones(4)),
            "token ids",
        ),
        (nn.Linear(2, 1), (torch.rand(4, 2), torch.rand(4) + 2), "regression targets"),
        (nn.Linear(2, 3), (torch.rand(4, 2), torch.tensor([0, 1, 2, 3])), "labels from 0 to 2"),
    ],
)
def test_data_that_do_not_suit_the_model_switch_off_margins_only(tmp_path, model, pair, match):
    with (
        pytest.warns(UserWarning, match=f"'margin_gap' is switched off.*{match}"),
        excite.watch(model, run=tmp_path / "run", train=pair, example=pair[0]) as watch,
    ):
        watch.step(1.0)
    assert excite.load_run(tmp_path / "run").series("loss/step")[1].tolist() == [1.0]


def test_data_the_model_does_not_run_on_give_one_warning():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with excite.watch(model, optimizer=optimizer, train=(torch.rand(9, 2), torch.ones(9).long())) as watch:
            watch.step(1.0)
    [warning] = [str(one.message) for one in caught]
    assert warning.startswith("probes 'trajectory', 'conservation', 'alignment', 'margin_gap', 'rank' are switched off")
    assert "mat1 and mat2 shapes cannot be multiplied" in warning
    assert {probe.name for probe in watch.probes} == {"loss", "distance", "signs"}


def test_points_that_are_too_large_are_not_stored_which_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.monitor.results.MAX_BYTES", 10)
    with (
        pytest.warns(UserWarning, match="are not stored"),
        excite.watch(network(), run=tmp_path / "run", train=data(5)),
    ):
        pass
    assert read_points(tmp_path / "run") is None


@pytest.mark.parametrize(
    ("x", "normalize", "bounds"),
    [
        (torch.rand(9, 3, 8, 8), None, (0.0, 1.0)),
        (torch.rand(9, 3, 8, 8) * 2 - 1, None, (-1.0, 1.0)),
        (torch.randn(9, 3, 8, 8), None, None),
        (torch.randn(9, 3, 8, 8), (0.5, 0.25), (0.0, 1.0)),
        (torch.rand(9, 8), None, None),  # not images
        (torch.rand(9, 3, 8, 8) * 0.1, None, None),  # of unknown range
    ],
)
def test_bounds_are_those_of_pixels_where_that_is_clear(x, normalize, bounds):
    assert pixel_bounds({"train": Points(x, torch.zeros(9))}, None, normalize) == bounds
    assert pixel_bounds({"train": Points(x, torch.zeros(9))}, (-2, 2), normalize) == (-2, 2)


def test_a_model_of_several_inputs_is_refused():
    class Two(nn.Module):
        def forward(self, x, mask=None):
            return x

    rows = [{"x": torch.rand(3), "mask": torch.ones(3), "label": 0} for _ in range(4)]
    with warnings.catch_warnings(), pytest.raises(InputError, match="takes 'x' and 'mask'"):
        LiveMargins.draw(Two(), rows, None, normalize=None, bounds=None, threshold=0.5)


@pytest.mark.slow
def test_batches_that_are_dicts_work_with_a_model_of_a_tensor(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    batch = [{"image": one, "label": int(one.mean() > 0.5)} for one in torch.rand(20, 1, 4, 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with excite.watch(model, train=batch, test=batch, run=tmp_path / "run") as watch:
            watch.step(1.0)
    assert excite.load_run(tmp_path / "run").series("margin_gap/points/test")[1][[0, -1]].tolist() == [20, 20]


def test_images_of_bytes_are_refused_with_what_to_do(tmp_path):
    x = torch.randint(256, (20, 1, 4, 4), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.warns(UserWarning, match=r"margin_gap.*images of bytes have no margin.*such as \(x / 255, y\)"):
        excite.watch(model, train=(x, x[:, 0, 0, 0] % 2), run=tmp_path / "run").close()
