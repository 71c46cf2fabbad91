"""Lines of the log: one per rule and quantity, with what to do."""

from excite.monitor.alerts import Above, Alerts, NotFinite, advice, lines


def alerts_of(rules, values):
    return [alert for _, alert in Alerts(rules).update(3, values)]


def test_layers_of_one_quantity_are_one_line():
    ranks = {f"rank/effective/{i}": 1.0 for i in range(6)}
    (line,) = lines(alerts_of([Above("rank/effective/*", 0.5)], ranks))
    assert line.startswith("step 3: rank/effective/0 is 1, above 0.5; likewise 5 others: 1, 2, 3 and 2 more. ")
    assert line.endswith(advice("Above", "rank/effective"))


def test_rules_and_quantities_have_lines_of_their_own():
    begun = alerts_of(
        [NotFinite("*"), Above("loss/*", 1)], {"loss/step": float("inf"), "rank/effective/0": float("nan")}
    )
    assert [line.split(" is ")[0] for line in lines(begun)] == [
        "step 3: loss/step", "step 3: loss/step", "step 3: rank/effective/0"
    ]  # fmt: skip
    assert "Lower the learning rate" in lines(begun)[0]


def test_roles_are_named_behind_layers():
    begun = alerts_of([Above("rank/effective/*", 0.5)], {f"rank/effective/h.{i}.mlp": 1.0 for i in range(2)})
    (line,) = lines(begun, {f"h.{i}.mlp": f"layer {i}, MLP in" for i in range(2)})
    assert line.startswith(
        "step 3: rank/effective/h.0.mlp (layer 0, MLP in) is 1, above 0.5; likewise 1 other: h.1.mlp (layer 1, MLP in). "
    )
