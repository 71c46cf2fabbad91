"""What changed, in words: sentences from made-up curves whose story is known."""

import numpy as np
import pytest

from excite.report.history import MetricHistory
from excite.report.narrative import Finding, findings, number

STEPS = np.arange(0, 4001, 100)


def find(curves, order=()):
    curves = {name: (STEPS, np.broadcast_to(np.asarray(v, float), STEPS.shape)) for name, v in curves.items()}
    return findings(MetricHistory(curves, curves.__getitem__, order))


def texts(curves, kind=None):
    return [one.text for one in find(curves) if kind is None or one.kind == kind]


def test_a_layer_that_loses_rank_is_named_with_the_step():
    rank = np.where(STEPS <= 2000, 61.0, 9.0)
    (found,) = texts({"rank/effective/fc2": rank, "rank/share/fc2": rank / 240}, "warning")
    assert found == (
        "Layer fc2's input activations fell from rank 61 to 9 since step 2,000: it now sees about 9 of 240 directions, and "
        "its weights along the others are no longer excited."
    )


def test_what_fell_at_once_did_so_since_the_start():
    (found,) = texts({"rank/effective/a": np.where(STEPS == 0, 20.0, 2.0)}, "warning")
    assert "fell from rank 20 to 2 since the start" in found


def test_units_that_are_no_longer_excited_are_named():
    curves = {f"rank/unit/fc2/{unit}": STEPS > 2000 for unit in (3, 17, 40)}
    curves |= {"rank/unit/fc2/6": STEPS < 2000}  # excited again: no news
    assert texts(curves) == ["In layer fc2, units 3, 17 and 40 are no longer excited by the example."]
    rank = np.where(STEPS <= 2000, 61.0, 9.0)
    (one,) = texts(curves | {"rank/effective/fc2": rank, "rank/share/fc2": rank / 240}, "warning")
    assert one == (
        "Layer fc2's input activations fell from rank 61 to 9 since step 2,000: it now sees about 9 of 240 directions; "
        "units 3, 17 and 40 are no longer excited."
    )
    (share,) = texts({"rank/deficient/fc1": np.where(STEPS > 1000, 0.5, 0.1)})
    assert share.startswith(
        "In layer fc1, 50% of the units are not excited by the example, 10% at best before (since step 1,000)"
    )


def test_only_large_changes_of_rank_are_told_and_the_worst_first():
    curves = {f"rank/effective/{i}": np.linspace(50, 50 - 8 * i, len(STEPS)) for i in range(6)}
    (found,) = texts(curves, "warning")  # one line for all of them
    assert found.startswith("The inputs of 4 layers lost rank: 5 from 50 to 10 since")
    assert [found.index(f"{layer} from") for layer in (5, 4, 3)] == sorted(found.index(f"{i} from") for i in (3, 4, 5))
    assert ", and 1 more; weights along" in found
    assert texts({"rank/effective/a": np.linspace(2, 20, len(STEPS))}, "good") == [
        "Layers gained rank, they see more directions of their input: a from 2 to 20 since step 400."
    ]


def test_a_flat_loss_makes_growing_steepness_a_warning():
    steep = {"trajectory/mean/conv1": np.linspace(1, 4, len(STEPS))}
    (found,) = texts(steep | {"loss/step": 0.5}, "warning")
    assert "4 times steeper" in found
    assert "while the loss hardly moved" in found
    assert not texts(steep | {"loss/step": np.linspace(1, 0.1, len(STEPS))}, "warning")


def test_steady_updates_are_told_with_the_step_since_when():
    steady = {"trajectory/phi/conv1": np.linspace(4, 3.1, len(STEPS)), "trajectory/tau/conv1": np.minimum(STEPS, 1200)}
    assert texts(steady) == ["Updates are steady: none was seen above 3.1 at layer conv1 since step 1,200."]
    two = steady | {"trajectory/phi/fc1": 2.0, "trajectory/tau/fc1": 0.0}
    assert texts(two) == [
        "Updates are steady: none was seen above 3.1 at layer conv1 since step 1,200; 2 at layer fc1 since the start."
    ]
    settled = steady | {"trajectory/phi/conv1": np.minimum(3.1, 0.1 + STEPS / 500)}  # grew in the first half only
    assert texts(settled) == texts(steady)
    growing = {"trajectory/phi/conv1": np.linspace(1, 4, len(STEPS)), "trajectory/tau/conv1": 0.0}
    assert texts(growing) == []
    unknown = {"trajectory/phi/conv1": np.where(STEPS < 3000, 1.0, np.nan), "trajectory/tau/conv1": 0.0}
    assert texts(unknown) == []
    assert not any("steady" in text for text in texts(steady | {"loss/step": np.where(STEPS == 1500, np.nan, 1.0)}))


def test_loss_that_breaks_or_diverges():
    broken = np.where(STEPS == 1500, np.nan, 1.0)
    assert texts({"loss/step": broken}, "warning")[0].startswith("The loss is not a finite number at step 1,500")
    assert "training diverges" in texts({"loss/step": np.linspace(1, 9, len(STEPS))}, "warning")[0]
    assert texts({"loss/step": np.linspace(2, 1, len(STEPS))}) == ["The loss went from 2 to 1."]


def test_balance_alignment_signs_margin_and_distance():
    assert "drifted by 5.0%" in texts({"conservation/rest/a>b": np.linspace(0, 0.05, len(STEPS))}, "warning")[0]
    explained = {"conservation/rest/a>b": 1e-9, "conservation/drift/a>b": np.linspace(0, 0.02, len(STEPS))}
    assert texts(explained) == [
        "The balance of layers moved by up to 2.00% of the squared weights; step size, momentum and decay explain it to within "
        "1e-09."
    ]
    unchecked = {"conservation/drift/a>b": 0.3, "conservation/unchecked/a>b": 1.0, "conservation/label/closure": 1.0}
    assert texts(unchecked) == [
        "The balance of a>b was not checked: optimizer.step(closure) makes the gradients inside the step, where they cannot be read."
    ]
    assert [text.split(" of ")[0] for text in texts({**explained, "conservation/unchecked/c": 0.5})] == [
        "The balance"
    ] * 2
    assert "a>b from 0.10 to 0.90" in texts({"alignment/aligned/a>b": np.linspace(0.1, 0.9, len(STEPS))})[0]
    signs = {"signs/stable": 1.0, "signs/since": np.maximum(STEPS - 1200, 0), "signs/changed": 0.0}
    assert "for 2,800 steps, since step 1,200" in texts(signs)[0]
    assert "Signs still change: 3.00%" in texts({**signs, "signs/stable": 0.0, "signs/changed": 0.03})[0]
    assert "grew from 0.11 to 0.3" in texts({"margin/median": np.linspace(0.1, 0.3, len(STEPS))}, "good")[0]
    assert "fell from 0.29 to 0.1" in texts({"margin/median": np.linspace(0.3, 0.1, len(STEPS))})[0]
    assert not texts({"margin/median": np.where(STEPS == 0, 3.0, 0.1)})  # before training it meant nothing
    assert texts({"distance/relative": 1.5}) == ["The weights have moved by 150% of their initial norm."]


def test_nothing_measured_says_nothing():
    assert find({}) == []
    empty = (np.empty(0, np.int64), np.empty(0))
    names = ["loss/step", "rank/effective/a", "rank/share/a", "trajectory/mean/a", "signs/stable", "signs/since", "distance/relative",
             "conservation/rest/a", "margin/median", "rank/deficient/a", "alignment/aligned/a"]  # fmt: skip
    assert findings(MetricHistory(names, lambda name: empty)) == []
    one = (np.array([0]), np.array([1.0]))
    assert all(isinstance(found, Finding) for found in findings(MetricHistory(names, lambda name: one)))
    broken = (STEPS, np.full(len(STEPS), np.nan))
    assert len(findings(MetricHistory(names, lambda name: broken))) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(61.2, "61"), (9.34, "9.34"), (1234.5, "1,234"), (0.00123, "0.0012"), (2.0, "2"), (2.5e30, "2.5e+30")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_which_statistics_normalizations_used():
    (one,) = find({"rank/statistics/example": 20, "rank/statistics/running": 3})
    assert one == Finding(
        "note",
        "Statistics of the normalizations when layers were measured: 20 with those of the example, as in training; 3 with "
        "running statistics, because they are in evaluation mode.",
        panel="ranks",
        docs=one.docs,
    )
    (few,) = texts({"rank/statistics/few": 1}, "warning")
    assert "one value per channel" in few
    (changed,) = texts({"rank/statistics/example": np.where(STEPS > 2000, 10, 20)}, "warning")
    assert "do not compare" in changed


@pytest.mark.parametrize(("label", "text"), [("random", "sub-networks"), ("coupled", "batch normalization"), ("repeated", "counts the first")])  # fmt: skip
def test_labels_of_the_trajectory_are_said(label: str, text: str) -> None:
    found = texts({f"trajectory/label/{label}": np.ones(len(STEPS))})
    assert len(found) == 1
    assert text in found[0]


def test_an_untrained_network_is_no_baseline():
    loss = np.where(STEPS < 1000, 2.0, 0.1)
    slope = np.where(STEPS < 1000, 0.1, 3.0)  # grew while it learned
    assert not [text for text in texts({"trajectory/mean/a": slope, "loss/step": loss}) if "steeper" in text]
    margin = np.where(STEPS < 1000, 0.001, 0.1)
    assert not [text for text in texts({"margin/median": margin, "loss/step": loss}) if "margin" in text]
    wrong = np.where(STEPS < 2000, 0.6, 0.05)  # margins while most points are misclassified do not compare
    late = {"margin/median": np.where(STEPS < 2000, 0.001, 0.1), "margin/misclassified": wrong}
    assert not [text for text in texts(late) if "median margin" in text]
    assert [text for text in texts(late | {"margin/misclassified": 0.05}) if "median margin grew" in text]
    rank = np.where(STEPS == 0, 60.0, 8.0)
    assert texts({"rank/effective/a": rank}, "warning")
    assert not texts({"rank/effective/a": rank, "rank/statistics/running": 3.0}, "warning")


def test_noise_makes_no_findings():
    rng = np.random.default_rng(0)
    for _ in range(50):
        noisy = {
            name: np.exp(rng.normal(0, 0.4, len(STEPS))) for name in ("loss/step", "trajectory/mean/a", "margin/median")
        }
        noisy |= {
            "rank/effective/a": 20 + 4 * rng.normal(size=len(STEPS)),
            "alignment/aligned/a>b": rng.uniform(0.3, 0.9, len(STEPS)),
        }
        found = [one for one in texts(noisy) if not one.startswith("The loss ")]
        assert found == []
