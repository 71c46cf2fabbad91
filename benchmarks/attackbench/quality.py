"""How good an attack is: AttackBench's optimality, the fraction of points near the best, and what of it is chance.

The envelope is the smallest distance that any attack found at each point. With the area under a curve of robust accuracy up to
the largest distance D of the envelope, which is the mean of min(distance, D),

    optimality = 1 − (area(attack) − area(envelope)) / (clean accuracy · D − area(envelope))

(Cinà et al., "AttackBench", AAAI 2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
NEAR = 1.01


def envelope(distances: Mapping[str, Array]) -> Array:
    """(N,): the smallest distance that any attack found."""
    return np.min(np.stack(list(distances.values())), axis=0)


def optimality(distances: Array, best: Array) -> float:
    """AttackBench's measure, from the distances (N,) of one attack and the envelope; 1 is the best."""
    finite = best[np.isfinite(best)]
    end = float(finite.max(initial=0.0))
    clean = float((best > 0).mean())
    area, least = (float(np.minimum(values, end).mean()) for values in (distances, best))
    return 1.0 if clean * end <= least else 1 - (area - least) / (clean * end - least)


def near(distances: Array, best: Array) -> float:
    """The fraction of the points that are classified correctly at which an attack is within 1 % of the envelope."""
    attacked = best > 0
    ours, least = distances[attacked], best[attacked]
    return float(((ours <= NEAR * least) | (np.isinf(ours) & np.isinf(least))).mean()) if attacked.any() else 1.0


def paired_difference(
    ours: Array, theirs: Array, best: Array, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Optimality of ours minus theirs, with the 95 % interval of a bootstrap over images, the same for both."""
    rng = np.random.default_rng(seed)
    draws = np.empty(resamples)
    for i in range(resamples):
        index = rng.integers(0, len(best), len(best))
        draws[i] = optimality(ours[index], best[index]) - optimality(theirs[index], best[index])
    low, high = np.quantile(draws, (0.025, 0.975))
    return optimality(ours, best) - optimality(theirs, best), float(low), float(high)
