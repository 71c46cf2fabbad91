"""The cost model of benchmarks.scaling: it finds the costs that made-up measurements were made with."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.scaling import Subject, measure
from benchmarks.scaling_model import (
    LANGUAGE,
    SEARCH,
    TARGETS,
    Measurement,
    Model,
    Target,
    fit,
    grams,
    page,
    resnet50_shapes,
    work,
)
from torch.utils.flop_counter import FlopCounterMode

RATE = {"resnet": 2e13, "transformer": 3e13}
EXCITED, LOOK, LEDGER = (1.2, -4e-6), (0.4, 5e-11, 2e-4, 3e-14), (3e-11, 4e-5)


def made_up(noise: float = 0.0) -> list[Measurement]:
    """Networks whose times follow the model exactly, or up to noise."""
    draw, found = np.random.default_rng(0), []
    for i in range(14):
        family, turns = ("resnet", 1) if i % 2 else ("transformer", 0)
        parameters, layers, batch = (
            int(10 ** draw.uniform(5, 8)),
            int(draw.integers(8, 90)),
            int(draw.integers(64, 512)),
        )
        flops, g = 10 ** draw.uniform(11, 13), 10 ** draw.uniform(8, 12)
        plain = flops / RATE[family]
        n_passes = layers * (SEARCH + 1 + turns)
        wobble = 1 + noise * draw.standard_normal(3)
        excited = EXCITED[0] * work(SEARCH, turns) * plain + EXCITED[1] * n_passes
        look = np.dot(LOOK, [plain * 32 / batch, parameters, layers, g])
        adds = np.dot(LEDGER, [parameters // 2, layers])
        found.append(
            Measurement(
                family, f"{family} {i}", batch, parameters, layers, turns, flops, g, 32, parameters // 2, plain,
                excited * wobble[0], plain + adds * wobble[1], plain, look * wobble[2],
            )
        )  # fmt: skip
    return found


def test_the_fit_recovers_the_coefficients():
    model = Model(made_up())
    for one, truth in ((model.excited, EXCITED), (model.measurement, LOOK), (model.ledger, LEDGER)):
        assert one.coefficients == pytest.approx(truth, rel=1e-6)
        assert one.worst < 1e-6
        assert one.left_out < 1e-5
        assert one.r2 == pytest.approx(1)
    assert model.rates == pytest.approx(RATE)


def test_noise_shows_in_errors_and_hardly_in_coefficients():
    model = Model(made_up(noise=0.05))
    assert model.excited.coefficients[0] == pytest.approx(EXCITED[0], rel=0.1)
    assert 0.01 < model.excited.worst <= model.excited.left_out < 0.5


def test_a_cost_that_is_not_there_gets_no_negative_coefficient():
    columns = [[1.0, 5.0], [2.0, 3.0], [4.0, 1.0], [8.0, 2.0]]
    times = [a - 0.01 * b for a, b in columns]
    assert fit(("a", "b"), columns, times).coefficients[1] == 0
    assert fit(("a", "b"), columns, times, signed=("b",)).coefficients == pytest.approx((1, -0.01))


@pytest.mark.parametrize("change", ["parameters", "flops", "layers", "classes"])
def test_predictions_grow_with_what_they_are_made_of(change):
    model = Model(made_up())
    small = Target("small", ((64, 64),) * 20, 1e8, 1e13, 128, 0, "resnet")
    large = {
        "parameters": replace(small, parameters=2e8),
        "flops": replace(small, flops=2e13),
        "layers": replace(small, shapes=small.shapes * 2),
        "classes": replace(small, turns=1),
    }[change]
    a, b = model.predict(small), model.predict(large)
    grown = {
        "parameters": ("measurement", "watch", "ledger", "watch_bytes", "ledger_bytes"),
        "flops": ("plain", "excited", "measurement"),
        "layers": ("measurement", "ledger"),
        "classes": ("excited",),
    }[change]
    assert all(b[name] > a[name] for name in grown)
    assert model.predict(replace(small, shares=4))["watch_bytes"] == a["watch_bytes"] / 4


def test_the_target_shapes_have_the_stated_parameter_counts():
    assert len(resnet50_shapes()) == 54
    assert len(LANGUAGE) == 225
    for target in TARGETS:
        assert sum(a * b for a, b in target.shapes) == pytest.approx(target.parameters, rel=0.03)
    assert grams([(3, 5), (5000, 5000)]) == 45


@pytest.mark.slow
def test_work_counts_the_passes_of_the_search():
    """Forwards and gradients of the batch, counted in floating-point operations, against the formula."""
    for family, size in (("resnet", (4, 0)), ("transformer", (2, 64))):
        subject = Subject(family, size, 4, 8, torch.device("cpu"))
        model, _ = subject.trainer()
        excited = subject.excited(model)
        excited()  # the first call also finds where the batch lies
        counts = []
        for loss in (partial(subject.loss, model), excited):
            with FlopCounterMode(display=False) as counter:
                loss().backward()
            counts.append(counter.get_total_flops())
        # The first layer of a plain step needs no gradient by its input, that of a search does.
        assert counts[1] / counts[0] == pytest.approx(work(SEARCH, 1 if subject.classes else 0), rel=0.02)


@pytest.mark.slow
def test_a_small_network_is_measured_and_its_page_printed():
    found = measure(Subject("transformer", (1, 16), 2, 4, torch.device("cpu")), 1)
    assert found.layers == 5
    assert found.excited > found.plain > 0
    assert Measurement(**asdict(found)) == found
    text = page("here", made_up())
    assert all(name in text for name in ("ResNet-50", "ViT-B/16", "7 B language model"))
    assert "bfloat16" not in text  # assumed for a GPU, and no GPU was measured
    on_gpu = [replace(one, peak_plain=2e9, peak_excited=5e9, watch_bytes=9.0 * one.parameters) for one in made_up()]
    assert "| 2.50 | 9.0 |" in page("there", on_gpu)
    assert "bfloat16" in page("there", on_gpu)
