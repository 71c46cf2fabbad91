"""Intervals over seeds, and over seeds and images."""

from __future__ import annotations

import math

import numpy as np
import pytest

from excite.margin.gap import ks_of_samples
from excite.studies.judging.intervals import Array, MeanEffect, over_seeds, over_seeds_and_images, resample


def crossed(rng: np.random.Generator, seeds: int, images: int, by_seed: float, by_image: float, rest: float) -> Array:
    """(seeds, images): 0.3 plus what the seed, the image and both together add."""
    return (
        0.3
        + by_seed * rng.normal(size=(seeds, 1))
        + by_image * rng.normal(size=(1, images))
        + rest * rng.normal(size=(seeds, images))
    )


def on_resamples(effects: Array, draws: int = 100, stream: int = 0) -> Array:
    return np.asarray(effects[:, resample(effects.shape[1], draws, stream)].mean(2))


@pytest.mark.parametrize(
    ("seeds", "by_seed", "by_image", "rest"),
    [
        (5, 0.1, 1.0, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((10, 0.3, 2.0, 1.0), (10, 0.02, 1.0, 0.2), (5, 0.1, 0.1, 0.5))
        ),
    ],
)
def test_coverage_over_seeds_and_images(seeds: int, by_seed: float, by_image: float, rest: float) -> None:
    rng = np.random.default_rng(0)
    covered = np.zeros(2)
    for stream in range(repeats := 1000):
        effects = crossed(rng, seeds, 100, by_seed, by_image, rest)
        means = effects.mean(1)
        both = over_seeds_and_images(means, on_resamples(effects, stream=stream))
        for at, (low, high) in enumerate((both.interval(), over_seeds(means).interval())):
            covered[at] += low <= 0.3 <= high
    together, alone = covered / repeats
    assert 0.93 <= together <= 0.97
    if by_image >= 1:  # the images matter: seeds alone say too much
        assert alone < 0.92


@pytest.mark.slow
@pytest.mark.parametrize(("overfit", "true_gap"), [((0.25, 0.25), 0.0), ((0.05, 0.25), -0.106)])
def test_coverage_of_gaps_and_medians(overfit: tuple[float, float], true_gap: float) -> None:
    """Two variants whose training margins are exp(overfit) times those of test images; 5 seeds, 100 images.

    A gap of so few images is larger than that of all images, the more so the smaller it is. So a difference of gaps is underestimated:
    its interval misses the true one more often, on the side of no difference.
    """
    points, seeds, draws, repeats = 100, 5, 40, 200
    covered, beyond = np.zeros(2), 0.0
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        images = 0.6 * rng.normal(size=(2, points))  # training, test: the same for all seeds and variants
        chosen = [resample(points, draws, 2 * repeat + split) for split in (0, 1)]
        gaps, medians = [], []
        for variant in (0, 1):
            own = 0.05 * rng.normal(size=(2, seeds, 1)) + 0.3 * rng.normal(size=(2, seeds, points))
            margins = np.exp(images[:, None] + own)
            margins[0] *= np.exp(overfit[variant])
            drawn = [margins[split][:, chosen[split]] for split in (0, 1)]  # (seeds, draws, points)
            gaps.append(
                [[ks_of_samples(*(d[seed, at] for d in drawn)) for at in range(draws)] for seed in range(seeds)]
            )
            gaps[-1] = [[ks_of_samples(*margins[:, seed]), *gaps[-1][seed]] for seed in range(seeds)]
            medians.append(np.concatenate([np.median(margins[1], 1)[:, None], np.median(drawn[1], 2)], 1))
        for at, (values, truth) in enumerate(((gaps, true_gap), (medians, 0.0))):
            effects = np.array(values[0]) - np.array(values[1])
            low, high = over_seeds_and_images(effects[:, 0], effects[:, 1:]).interval()
            covered[at] += low <= truth <= high
            beyond += at == 0 and high < truth
    assert 0.92 <= covered[1] / repeats <= 0.99  # 93 to 97 %, and two standard deviations of 200 repeats
    assert covered[0] / repeats >= (0.92 if true_gap == 0 else 0.85)
    assert beyond / repeats <= 0.04  # a difference is hardly ever overestimated


def test_images_never_narrow_an_interval() -> None:
    rng = np.random.default_rng(1)
    for stream in range(50):
        effects = crossed(rng, 4, 50, 0.1, 0.1, 1.0)
        both = over_seeds_and_images(effects.mean(1), on_resamples(effects, stream=stream))
        assert both.error >= over_seeds(effects.mean(1)).error
        assert (both.by_images or 0.0) >= 0


def test_without_spread_over_images_it_is_students_interval() -> None:
    effects = np.array([0.1, 0.2, 0.3])
    alone = over_seeds(effects)
    same = over_seeds_and_images(effects, np.repeat(effects[:, None], 10, 1))
    assert same.interval() == pytest.approx(alone.interval())


@pytest.mark.parametrize("bad", [np.array([0.1]), np.array([0.1, math.inf])])
def test_unknown_errors_are_unbounded(bad: Array) -> None:
    estimate = over_seeds_and_images(bad, np.ones((len(bad), 5)))
    assert estimate.interval() == (-math.inf, math.inf)
    assert estimate.p_value(0.0) == 1.0
    assert estimate.by_images is None


def test_resamples_that_are_not_finite_are_not_used() -> None:
    effects = np.array([0.1, 0.3])
    assert over_seeds_and_images(effects, np.full((2, 5), math.nan)) == over_seeds(effects)


def test_constant_effects_have_no_error() -> None:
    estimate = over_seeds_and_images(np.ones(3), np.ones((3, 5)))
    assert estimate == MeanEffect(1.0, 0.0, 2, 0.0)
    assert (estimate.p_value(0.5), estimate.p_value(1.0)) == (0.25, 1.0)  # three seeds on one side, by the sign test
    assert estimate.interval() == (-math.inf, math.inf)
    assert over_seeds(np.ones(6)).interval() == (1.0, 1.0)
    assert over_seeds(np.ones(6)).p_value(0.5) == 2**-5


def test_resamples_are_always_the_same() -> None:
    assert (resample(7, 3) == resample(7, 3)).all()
    assert (resample(7, 3) != resample(7, 3, 1)).any()
    assert resample(7, 300).max() == 6
