"""Rules on made-up series, and the default rules in a training where nothing is wrong."""

import logging
import math

import pytest
import torch

import excite
from excite import InputError
from excite.monitor.alerts import (
    Above,
    Alerts,
    Below,
    Fell,
    NotFinite,
    Rule,
    SteeperWhileFlat,
    default_alerts,
)
from models import build


def begins(rules, series):
    """Steps at which rules begin to be true; series: {name: values}, value i at step 10 i."""
    alerts, found = Alerts(rules), []
    for i in range(max(map(len, series.values()))):
        values = {name: float(one[i]) for name, one in series.items() if i < len(one)}
        found += [alert for _, alert in alerts.update(10 * i, values)]
    return found


def test_thresholds_speak_once_until_they_were_false():
    found = begins([Above("a/*", 2)], {"a/b": [1, 3, 3, 1, 3], "b/c": [9] * 5})
    assert [(one.step, one.name, one.value) for one in found] == [(10, "a/b", 3), (40, "a/b", 3)]
    assert str(found[0]) == "step 10: a/b is 3, above 2"
    assert [one.step for one in begins([Above("a/b", 2, measurements=3)], {"a/b": [3, 3, 1, 3, 3, 3, 3]})] == [50]
    assert [one.step for one in begins([Below("a/b", 2, measurements=2)], {"a/b": [1, 3, 1, 1]})] == [30]


def test_rank_collapse_is_a_fall_that_lasts():
    name = "rank/effective/fc2"
    found = begins([Fell()], {name: [40, 61, 50, 9, 55, 9, 9, 9]})
    assert [(one.step, one.message) for one in found] == [(70, "rank/effective/fc2 fell from 61 to 9")]
    assert not begins([Fell()], {name: [3, 0.1, 0.1, 0.1, 0.1]}), "a layer that never had a rank cannot lose it"
    assert not begins([Fell()], {name: [40, 61, 50, 16, 16, 16, 16]}), "a quarter is the limit"


def test_ranks_may_fall_to_the_number_of_classes():
    name, ranks, learned = "rank/effective/h.3.mlp", [22, 20, 4, 3, 3, 3], [1.4, 1.3, 0.9, 0.5, 0.2, 0.1]
    answers = {"rank/answers": [4] * 6}
    assert not begins([Fell()], {"loss/step": learned, name: ranks} | answers)
    assert begins([Fell()], {"loss/step": [1.4] * 6, name: ranks} | answers), "nothing was learned"
    assert begins([Fell()], {"loss/step": learned, name: [22, 20, 4, 1, 1, 1]} | answers), "less than four classes need"
    rising = {"loss/step": learned, name: [22, 20, 1.3, 1.4, 1.6, 2]} | answers
    assert not begins([Fell()], rising), "one direction is learned after the other"
    assert begins([Fell()], {"loss/step": [9, 8, 1.4, 1.4, 1.4, 1.4], name: ranks} | answers), "the loss of chance"
    assert begins([Fell()], {"loss/step": learned, name: ranks}), "a model with an answer for each token"


def test_steeper_while_flat_needs_both():
    rule = SteeperWhileFlat(window=100, measurements=5)
    steep, calm = [1.0] * 10 + [3.0] * 10, [1.0] * 20
    flat, falling = [0.5] * 20, [0.5] * 10 + [0.4] * 10
    name = "trajectory/mean/0"
    assert len(begins([rule], {name: steep, "loss/step": flat})) == 1
    assert not begins([rule], {name: steep, "loss/step": falling})
    assert not begins([rule], {name: calm, "loss/step": flat})
    assert not begins([rule], {name: steep[5:15], "loss/step": flat[5:15]}), "half a window is not enough"
    assert not begins([rule], {name: steep}), "without a loss nothing can be said"


def test_what_is_not_finite():
    found = begins([NotFinite("*")], {"loss/step": [1, math.nan, math.nan, math.inf], "margin/median": [math.inf] * 4})
    assert [one.step for one in found] == [10]


def test_bad_rules_are_refused():
    model, _ = build("mlp")
    with pytest.raises(InputError, match=r"expected rules such as.*got 'loss'"):
        excite.watch(model, alerts=["loss"])
    with pytest.raises(InputError, match="expected then='log', 'raise' or a function; got 'mail'"):
        Above("a", 1, then="mail")
    with pytest.raises(NotImplementedError, match="has to define judge"):
        Alerts([Rule()]).update(0, {"a": 1.0})


@pytest.mark.parametrize("kind", ["mlp", "convolutional"])
def test_the_defaults_do_not_cry_wolf(kind, tmp_path, caplog):
    model, x = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    y = torch.linspace(0, 1, len(x), dtype=x.dtype)
    with (
        caplog.at_level(logging.WARNING, logger="excite"),
        excite.watch(model, x, tmp_path / "run", optimizer, every={"trajectory": 5, "rank": 5}) as watch,
    ):
        for _ in range(200):
            optimizer.zero_grad()
            loss = (model(x).reshape(-1) - y).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert not [one for one in caplog.records if one.name == "excite"]
    assert len(default_alerts()) == 4
