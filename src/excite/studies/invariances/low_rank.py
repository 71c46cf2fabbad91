"""Do layers become rank one? Theorem 2 and Corollary 1 of Training invariances, for linear and for ReLU networks.

Bias-free fully connected networks x ↦ W_L σ(⋯ σ(W_1 x)) in float64, on points that a hyperplane through the origin separates.
The paper has no experiment: sizes, data and steps are ours. With logistic and exponential losses weights grow like a power
of log(time): each step is a thousandth of the weights' norm long instead (a step size of about 1/loss), which walks along
gradient flow's path to norms that fixed steps would never reach. With squared error, which has a minimum, steps are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from excite.bounds import alignment
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.excitation.linear_rank import RankScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
Weights = list[Array]
MEASUREMENTS = 40
STRIDE = 1e-3  # length of a growing step, relative to the norm of the weights
NEAR = 0.99
SETTLED = 0.9  # signs are settled if none changes after this fraction of the steps
LINEAR = {loss: f"linear, {loss}" for loss in ("logistic", "exponential", "squared")}
RELU = {loss: f"ReLU, {loss}" for loss in ("logistic", "exponential", "squared")}
SMALL = {"linear": "linear, squared, small first weights", "ReLU": "ReLU, squared, small first weights"}
MANY = {"linear": "linear, three classes", "ReLU": "ReLU, three classes"}
TWO = "ReLU, two points"


SCALES = {
    "quick": RankScale(
        name="quick", seeds=3, steps=6_000, widths=(6, 8, 8), points=20, every_variant=True,
        words="20 points in 6 dimensions, two hidden layers of width 8, 6,000 steps, 3 seeds",
    ),
    "paper": RankScale(
        name="paper", seeds=5, steps=10_000, widths=(10, 16, 16, 16), points=40, every_variant=True,
        words="40 points in 10 dimensions, three hidden layers of width 16, 10,000 steps, 5 seeds",
    ),
}  # fmt: skip


def variants(scale: RankScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "widths": [*scale.widths, 1], "points": scale.points, "gain": 1.0, "lr": 2e-3}
    result = []
    for names, leak in ((LINEAR, 1.0), (RELU, 0.0)):
        result += [Variant(name, {**base, "leak": leak, "loss": loss}) for loss, name in names.items()]
    for (activation, small), many in zip(SMALL.items(), MANY.values()):
        leak = 1.0 if activation == "linear" else 0.0
        result.append(Variant(small, {**base, "leak": leak, "loss": "squared", "gain": 0.1, "lr": 5e-3}))
        result.append(Variant(many, {**base, "leak": leak, "loss": "classes", "widths": [*scale.widths, 3]}))
    two = {**base, "widths": [2, 2, 1], "points": 2, "leak": 0.0, "loss": "logistic", "two points": True}
    return [*result, Variant(TWO, two)]


def data_and_weights(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, Weights]:
    """Points (N, n); labels ±1, or classes 0 to 2; first weights with variance gain² / inputs.

    Two points: 100° apart, with the same label; unit i along point i, all within a tenth.
    """
    rng = np.random.default_rng(seed)
    widths = settings["widths"]
    if settings.get("two points"):
        turn = np.deg2rad(20 + np.array([0.0, 100.0]))
        x = np.stack([np.cos(turn), np.sin(turn)], 1)
        return x, np.ones(2), [x + rng.uniform(-0.1, 0.1, (2, 2)), np.ones((1, 2)) + rng.uniform(-0.1, 0.1, (1, 2))]
    x = rng.normal(size=(settings["points"], widths[0]))
    if settings["loss"] == "classes":
        normals = np.linalg.qr(rng.normal(size=(widths[0], widths[-1])))[0].T
        y = (x @ normals.T).argmax(1).astype(np.float64)
        x = x + 0.5 * normals[y.astype(int)]
    else:
        normal = rng.normal(size=widths[0])
        normal /= np.linalg.norm(normal)
        y = np.where(x @ normal > 0, 1.0, -1.0)
        x = x + 0.3 * y[:, None] * normal
    shapes = zip(widths[1:], widths)
    spread = 2.0 if settings["leak"] == 0 else 1.0  # He: half of the units are off
    return x, y, [settings["gain"] * rng.normal(size=(o, i)) * np.sqrt(spread / i) for o, i in shapes]


# Derivatives (N, outputs) by the outputs z, each up to a common factor that keeps the largest from vanishing.
def _logistic(z: Array, y: Array) -> Array:
    margins = y[:, None] * z
    return -y[:, None] * np.exp(max(0.0, float(margins.min())) - np.logaddexp(0, margins))


def _exponential(z: Array, y: Array) -> Array:
    margins = y[:, None] * z
    return np.asarray(-y[:, None] * np.exp(margins.min() - margins))


def _classes(z: Array, y: Array) -> Array:
    k, rows = y.astype(int), np.arange(len(z))
    logs = z - logsumexp(z, axis=1, keepdims=True)
    others = logs.copy()
    others[rows, k] = -np.inf
    logs[rows, k] = logsumexp(others, axis=1)  # log(1 − p) of the right class
    slopes = np.exp(logs - logs[rows, k].max())
    slopes[rows, k] *= -1
    return np.asarray(slopes)


SLOPES: dict[str, Callable[[Array, Array], Array]] = {
    "logistic": _logistic,
    "exponential": _exponential,
    "classes": _classes,
    "squared": lambda z, y: z - y[:, None],  # of ½ Σ (z − y)²
}


def forward(weights: Weights, x: Array, leak: float) -> tuple[list[Array], list[Array], Array]:
    """Inputs of each layer, the slopes of its units, and the outputs (N, outputs)."""
    inputs, slopes = [x], []
    for w in weights[:-1]:
        z = inputs[-1] @ w.T
        slopes.append(np.where(z > 0, 1.0, leak))
        inputs.append(z * slopes[-1])
    return inputs, slopes, inputs[-1] @ weights[-1].T


def step(weights: Weights, x: Array, y: Array, settings: Mapping[str, Any]) -> Weights:
    """One step of gradient descent: of fixed size for squared error, else of length STRIDE times the norm of the weights."""
    inputs, slopes, z = forward(weights, x, settings["leak"])
    back = SLOPES[settings["loss"]](z, y)
    gradients: Weights = []
    for k in reversed(range(len(weights))):
        gradients.insert(0, back.T @ inputs[k])
        if k:
            back = (back @ weights[k]) * slopes[k - 1]
    size = settings["lr"]
    if settings["loss"] != "squared":
        length = norm(gradients)
        size = STRIDE * norm(weights) / length if length > 0 else 0.0
    return [w - size * g for w, g in zip(weights, gradients)]


def norm(weights: Weights) -> float:
    """Norm of all weights together."""
    return float(np.sqrt(sum(float((p**2).sum()) for p in weights)))


def ratios(weights: Weights) -> list[float]:
    """‖W‖₂²/‖W‖²_F by layer."""
    return [float(np.linalg.norm(w, 2) ** 2 / (w**2).sum()) if w.any() else 0.0 for w in weights]


def differences(weights: Weights) -> list[Array]:
    """W_l W_l' − W_{l+1}' W_{l+1} for consecutive layers."""
    return [a @ a.T - b.T @ b for a, b in pairwise(weights)]


def moved(weights: Weights, start: list[Array]) -> tuple[float, float]:
    """How far the laws moved, over the squared norm of the layer: largest entry on the diagonal, and off it."""
    on, off = 0.0, 0.0
    for w, after, before in zip(weights, differences(weights), start):
        change = np.abs(after - before) / float((w**2).sum())
        on = max(on, float(np.diag(change).max()))
        off = max(off, float((change - np.diag(np.diag(change))).max()))
    return on, off


def right(weights: Weights, x: Array, y: Array, settings: Mapping[str, Any]) -> float:
    """Fraction of training points on the right side."""
    z = forward(weights, x, settings["leak"])[2]
    if settings["loss"] == "classes":
        return float((z.argmax(1) == y).mean())
    return float((z[:, 0] * y > 0).mean())


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x, y, weights = data_and_weights(seed, settings)
    first, laws, steps = norm(weights), differences(weights), settings["steps"]
    measured_steps = {0, *np.unique(np.geomspace(1, steps, MEASUREMENTS).round()).astype(int).tolist()}
    hidden = slice(None, -1) if len(weights[-1]) == 1 else slice(None)  # one row has rank one
    curve, changed = [], 0
    signs = [np.sign(w) for w in weights]
    for number in range(steps + 1):
        if number in measured_steps:
            aligned = alignment(weights)
            curve.append((number, ratios(weights[hidden]), aligned.tolist(), norm(weights) / first))
            on_progress(number / steps)
        if number < steps:
            weights = step(weights, x, y, settings)
            new_signs = [np.sign(w) for w in weights]
            if any((a != b).any() for a, b in zip(new_signs, signs)):
                changed, signs = number + 1, new_signs
    on, off = moved(weights, laws)
    _, result, aligned_by, grown = curve[-1]
    values = {
        "ratio": min(result),
        "alignment": min(aligned_by),
        "grown": grown,
        "settled": changed / steps,
        "on": on,
        "off": off,
        "right": right(weights, x, y, settings),
    }
    return Outcome(values, {"curve": curve})


_LIMIT = "‖W_j(t)/‖W_j(t)‖_F − u_j(t)v_j'(t)‖_F → 0, |⟨v_{j+1}, u_j⟩| → 1"
_QUOTES = {
    "Training invariances, Theorem 2": f"for the last few fully-connected layers j […] we have, in the limit of t → ∞: {_LIMIT}",
    "Training invariances, Corollary 1": "For fully-connected networks with ReLU activations, trained with linearly separable data under "
    "logistic loss ℓ, under the assumptions that R(w(0)) < ℓ(0) and the limiting direction of weight vector […] has no 0 entries, "
    "Equation 15 holds.",
    "after Training invariances, section 1": "They also include the squared loss used there, in addition to the exponential or logistic "
    "loss used in most theoretical low-rank results.",
}
_PAIRS = "Σ_{a∈IN} w_au(t)w_av(t) − Σ_{b∈OUT} w_ub(t)w_vb(t) = Σ_{a∈IN} w_au(0)w_av(0) − Σ_{b∈OUT} w_ub(0)w_vb(0)"


def claims(scale: RankScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    two, cor, theorem_1 = _QUOTES

    # Corollary 1 assumes that signs settle. Both statements are about a limit, so that finite training runs are judged by their mean.
    def rank_one(text: str, source: str, variant: str) -> Claim:
        measure = f"{variant}: smallest ‖W‖₂²/‖W‖²_F"
        return Claim(
            text, source, measure, (variant,), lambda n: n[variant].ratio, above=NEAR, **assumed(source, variant)
        ).quoting(_QUOTES.get(source, ""), "threshold" if source in (two, cor) else "ours")

    def aligned(text: str, source: str, variant: str) -> Claim:
        measure = f"{variant}: smallest alignment of adjacent layers"
        return Claim(
            text, source, measure, (variant,), lambda n: n[variant].alignment, above=NEAR, **assumed(source, variant)
        ).quoting(_QUOTES[source], "threshold")

    def assumed(source: str, variant: str) -> dict[str, Any]:
        return {"premise": lambda n: n[variant].settled < SETTLED} if source == cor else {}

    tails = ("logistic", "exponential")
    return [
        *(rank_one(f"layers of linear networks become rank one, {loss} loss", two, LINEAR[loss]) for loss in tails),
        *(aligned(f"and adjacent layers align, {loss} loss", two, LINEAR[loss]) for loss in tails),
        *(rank_one(f"layers of ReLU networks become rank one, {loss} loss", cor, RELU[loss]) for loss in tails),
        *(aligned(f"and adjacent layers align, {loss} loss", cor, RELU[loss]) for loss in tails),
        rank_one("they do so on two points 100° apart with the same label", cor, TWO),
        rank_one("squared error does it too, linear networks", theorem_1, LINEAR["squared"]),
        rank_one("squared error does it from small weights, linear networks", "observed", SMALL["linear"]),
        rank_one("squared error does it from small weights, ReLU networks", "observed", SMALL["ReLU"]),
        rank_one("layers of linear networks with three outputs become rank one", "beyond the paper", MANY["linear"]),
        Claim(
            "with three outputs the ratio is at least 1/3, linear networks",
            "excite.bounds.invariances.reduced_alignment",
            f"{MANY['linear']}: smallest ‖W‖₂²/‖W‖²_F",
            (MANY["linear"],),
            lambda n: n[MANY["linear"]].ratio,
            above=1 / 3,
            kind="universal",
        ),
        *_settling_and_conservation(),
    ]


def _settling_and_conservation() -> list[Claim]:
    """Claims on Assumption 1 and on Lemma 3."""
    return [
        *(
            Claim(
                f"signs settle: none changes in the last tenth, {name}",
                "Training invariances, Assumption 1",
                f"{name}: step of the last change, over all steps",
                (name,),
                lambda n, name=name: n[name].settled,  # type: ignore[misc]
                below=SETTLED,
            ).quoting("for all t ∈ [t_0, t_N), sgn(w(t)) = sgn(w(t_0))", "threshold")
            for name in (LINEAR["logistic"], RELU["logistic"])
        ),
        *(
            Claim(
                f"W₂'W₂ − W₁W₁' is conserved off the diagonal, {activation} networks",
                "Training invariances, Lemma 3",
                f"{name}: largest change of an entry over ‖W‖²_F",
                (name,),
                lambda n, name=name: n[name].off,  # type: ignore[misc]
                below=0.01,
            ).quoting(_PAIRS, "threshold")
            for activation, name in (("linear", LINEAR["logistic"]), ("ReLU", RELU["logistic"]))
        ),
        Claim(
            "and on the diagonal, ReLU networks",
            "Training invariances, Lemma 3",
            f"{RELU['logistic']}: largest change of an entry over ‖W‖²_F",
            (RELU["logistic"],),
            lambda n: n[RELU["logistic"]].on,
            below=0.01,
        ).quoting(
            "Σ_{u∈IN_v} w²_uv(t) − Σ_{b∈OUT_v} w²_vb(t) = Σ_{u∈IN_v} w²_uv(0) − Σ_{b∈OUT_v} w²_vb(0)", "threshold"
        ),
    ]


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    columns = min(4, len(details))
    rows = -(-len(details) // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 1.2 + 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(details) :]:
        axis.axis("off")
    handles: dict[str, Any] = {}
    for axis, (variant, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        steps = [point[0] for point in curve]
        for layer in range(len(curve[0][1])):
            label = f"layer {layer + 1}"
            line = axis.plot(
                steps, [p[1][layer] for p in curve], color=COLOURS[2 + layer % 5], linewidth=1.8, label=label
            )
            handles.setdefault(label, line[0])
        aligned = axis.plot(steps, [min(p[2]) for p in curve], color=COLOURS[0], linestyle=":", linewidth=1.6)
        handles.setdefault("smallest alignment", aligned[0])
        axis.set(ylim=(0, 1.03), xlim=(1, steps[-1]))
        axis.set_xscale("symlog", linthresh=1)
        axis.axhline(1, color="#bbb", linewidth=0.8, zorder=0)
        axis.set_title(f"{variant}\n(norm grew ×{curve[-1][3]:.3g})", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(r"$\|W\|_2^2\,/\,\|W\|_F^2$" + "\n(rank one: 1)")
    for axis in axes.flat[max(len(details) - columns, 0) : len(details)]:  # the lowest of every column
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
    ordered = sorted(handles.items())
    figure.legend(
        [h for _, h in ordered], [n for n, _ in ordered], loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title} The largest squared singular value over the sum of all, by layer", figure)}


STUDY = Study(
    "low-rank",
    "Do layers become rank one?",
    "Theorem 2 and Corollary 1 of Training Invariances and the Low-Rank Phenomenon",
    "Two classes that a hyperplane through the origin separates; three classes; two points",
    Computed(
        compute,
        {
            "ratio": ("smallest ‖W‖₂²/‖W‖²_F", "{:.3f}"),
            "alignment": ("smallest alignment", "{:.3f}"),
            "grown": ("weights grown by", "{:.3g}"),
            "settled": ("last sign change", "{:.0%}"),
            "on": ("diagonal law moved", "{:.1e}"),
            "off": ("off-diagonal moved", "{:.1e}"),
            "right": ("classified correctly", "{:.0%}"),
        },
        draw,
        "Each line is a layer of the first seed; the dotted line is the smallest alignment |⟨u, v⟩| of adjacent layers. Corollary 1\n"
        "says that all lines go to one, for ReLU networks too. The last layer, one row, is left out.",
        "Means over seeds, with the range. *Last sign change*: the step at which any weight changed its sign for the last time, over\n"
        "all steps. *Moved*: by how much W₂'W₂ − W₁W₁' changed since the start, its largest entry over ‖W‖²_F; steps of finite length\n"
        "move even what the flow conserves.",
        (
            "Float64, full batch. Initial weights have variance 1 / inputs, 2 / inputs for ReLU, times 0.01 where small.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "The paper has no experiment: sizes, data and steps are ours at both scales.",
        "Logistic, exponential and three classes: every step is 0.001 ‖θ‖ long (a step size of about 1/loss), so that norms become "
        "large. Squared error: fixed steps on ½Σ(z − y)², 0.002, and 0.005 from small weights.",
        "A sign that changes late says little: growing steps swing between support vectors, and one weight near zero among hundreds "
        "is enough. Assumption 1 does hold on the two points.",
        "Two points: unit i starts along point i within a tenth. Its limit is (1 + |cos 100°|)/2 = 0.587.",
    ),
    asks="do layers become rank 1?",
    seconds={"quick": 21, "paper": 470},
    sources=(
        "invariances:Theorem 2",
        "invariances:Corollary 1",
    ),
)
