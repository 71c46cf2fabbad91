"""Which vital signs are measured, and that they do not disturb the training."""

import pytest
import torch

import excite
from excite.probes import Every, Loss, vital_signs
from transformer_zoo import HandGPT, make


def train(watched, steps=3):
    torch.manual_seed(0)
    model = HandGPT("kernel")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(17, (4, 6))
    watch = (
        excite.watch(model, ids, optimizer=optimizer, probes=[Loss(), *vital_signs(1)], strict=True)
        if watched
        else None
    )
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss)
    if watch is not None:
        watch.close()
    return model.state_dict()


def test_a_watched_training_is_the_same_bit_by_bit():
    plain, watched = train(False), train(True)
    assert all(torch.equal(one, watched[path]) for path, one in plain.items())


def test_schedules_follow_the_interval():
    by_name = {probe.name: probe.schedule for probe in vital_signs(20)}
    assert by_name["attention"] == Every(20)
    assert by_name["token_rank"] == Every(100, offset=10)
    for every in (2, 7, 50):  # what takes long is measured at steps of its own
        due = {
            probe.name: {step for step in range(1, 1000) if probe.schedule.due(step)} for probe in vital_signs(every)
        }
        assert not due["token_rank"] & due["sharpness"]
        assert not (due["token_rank"] | due["sharpness"]) & due["attention"]
    with pytest.raises(excite.InputError, match="vital_signs: every"):
        vital_signs(0)


def test_models_with_attention_get_them_by_default(tmp_path):
    zoo = make("kernel")
    optimizer = torch.optim.SGD(zoo.model.parameters(), lr=0.1)
    with excite.watch(zoo.model, zoo.example, tmp_path / "run", optimizer) as watch:
        names = {probe.name for probe in watch.probes}
    assert {"attention", "residual", "log_z", "dead", "gradient", "update", "token_rank", "sharpness"} <= names
    assert "adam" not in names  # SGD has no moments
    model = torch.nn.Linear(3, 2)
    with excite.watch(model, torch.randn(4, 3), optimizer=torch.optim.Adam(model.parameters())) as watch:
        assert not {"attention", "adam", "update"} & {probe.name for probe in watch.probes}
