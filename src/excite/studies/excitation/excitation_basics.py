"""Section 1.1: what an online learner does not get to see it does not learn; and two arguments of the same kind, 3.1 and 5.2.

The paper tells these examples in words and gives no numbers: sizes and step sizes are ours. In each, one variant has an
excitation that fades or is missing and another has one that persists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.excitation.small_systems.online_learners import (
    bandit,
    linear_system,
    regression,
    scalar_system,
    stochastic_gradient,
)
from excite.studies.excitation.small_systems.unexcited_directions import centring, multiplying_node
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


EXPERIMENTS: dict[str, Callable[[Mapping[str, Any], int], Outcome]] = {
    "regression": regression,
    "scalar system": scalar_system,
    "linear system": linear_system,
    "stochastic gradient": stochastic_gradient,
    "bandit": bandit,
    "node": multiplying_node,
    "centring": centring,
}
_ONE = "Persistency of excitation, section 1.1"
_RICH = "Richness of hidden activations, section 1"
_NODE, _CENTRE = "Persistency of excitation, section 5.2", "Persistency of excitation, section 3.1"
_OWN = "not in the papers"


@dataclass(frozen=True, kw_only=True)
class BasicsScale(Scale):
    """Steps of each experiment, and bandits side by side."""

    steps: Mapping[str, int]
    bandits: int


SCALES: dict[str, BasicsScale] = {
    "quick": BasicsScale(
        name="quick",
        seeds=5,
        steps={
            "regression": 1000,
            "scalar system": 2000,
            "linear system": 3000,
            "stochastic gradient": 10000,
            "bandit": 2000,
            "node": 1000,
        },
        bandits=200,
        words="5 seeds, and fewer steps than at scale `paper`",
    ),
    "paper": BasicsScale(
        name="paper",
        seeds=10,
        steps={
            "regression": 2000,
            "scalar system": 5000,
            "linear system": 5000,
            "stochastic gradient": 20000,
            "bandit": 5000,
            "node": 2000,
        },
        bandits=1000,
        words=(
            "10 seeds; 2,000 steps of regression, 5,000 of the systems and the bandits (1,000 per seed), 20,000 stochastic "
            "gradients, 2,000 steps of the network with the node. The papers give no numbers for these examples"
        ),
    ),
}


def variants(scale: BasicsScale) -> list[Variant]:
    """Named after the experiment and, behind the colon, how it is excited."""

    def variant(experiment: str, how: str, **settings: Any) -> Variant:
        size = {"steps": scale.steps[experiment]} if experiment in scale.steps else {}
        return Variant(f"{experiment}: {how}", {"experiment": experiment, **size, **settings})

    return [
        variant("regression", "attenuated quickly", alpha=0.9),
        variant("regression", "attenuated slowly", alpha=0.99),
        variant("regression", "persistent", alpha=1.0),
        variant("scalar system", "no input", input="none"),
        variant("scalar system", "random signs", input="signs"),
        variant("linear system", "constant input", input="constant"),
        variant("linear system", "one frequency", input="one frequency"),
        variant("linear system", "two frequencies", input="two frequencies"),
        variant("stochastic gradient", "scaled down too fast", scaling="fast"),
        variant("stochastic gradient", "scaled down slowly", scaling="slow"),
        variant("stochastic gradient", "not scaled", scaling="none"),
        variant("bandit", "stops exploring", exploring="stops", bandits=scale.bandits),
        variant("bandit", "goes on exploring", exploring="goes on", bandits=scale.bandits),
        variant("node", "plain", excited="nothing"),
        variant("node", "input excited", excited="input"),
        variant("node", "input excited exactly", excited="exactly"),
        variant("node", "every layer excited", excited="every layer"),
        variant("centring", "origin elsewhere", origin="elsewhere"),
        variant("centring", "mean removed", origin="mean"),
        variant("centring", "support vectors centred", origin="support"),
    ]


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    return EXPERIMENTS[settings["experiment"]](settings, seed)


_ZERO = (
    "the algorithm will still converge, the error term will still become zero, but the parameters will not necessarily converge to the "
    "optimal θ"
)
_DECAY = "both x_t and x̂_t can decay to zero while θ̂ converges to some value different than θ"
_REMAIN = (
    "For online algorithms to learn the unknown parameters of a model correctly, the signals interacting with the parameter estimates "
    "need to remain persistently exciting"
)
_CANNOT = "the accurate input-output relationship of the system cannot be recovered"
_FREQUENCIES = "the input signal {x_t} needs to contain a certain number of frequencies"
_QUICKLY = "does not necessarily converge to the optimal value for θ if α_t attenuates f(θ) too quickly"
_BANDIT_ARM = "the algorithm can fail to discover the arm with the higher mean"
_SUFFICE = "this will likely not suffice to observe the effect of this node on the output of the network"
_EVERY = "inject exogenous perturbations […] so that even the parameters in the hidden layers receive persistent excitation during training"
_MEAN = "the term B can not be made zero simply by preprocessing the data and removing its mean"
_KNOWN = "making the bias term B zero requires the a priori knowledge of the set of support vectors"


def claims(scale: BasicsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    fading, quiet = "regression: attenuated quickly", "scalar system: no input"
    constant, rich = "linear system: constant input", "linear system: two frequencies"
    fast, stops = "stochastic gradient: scaled down too fast", "bandit: stops exploring"
    slow, every, mean = "stochastic gradient: scaled down slowly", "node: every layer excited", "centring: mean removed"
    exact, known = "node: input excited exactly", "centring: support vectors centred"
    elsewhere = "centring: origin elsewhere"
    return [
        _is("with measurements that are attenuated the error still becomes zero", _ONE, fading, "error", below=1e-6, kind="universal").quoting(_ZERO, "threshold"),
        _is("and the parameters end away from their true value", _ONE, fading, "wrong", above=0.1).quoting(_ZERO, "threshold"),
        _is("with measurements that persist they do not", _ONE, "regression: persistent", "wrong", below=1e-6, kind="universal").quoting("the parameter estimate is guaranteed to converge to the optimal value of θ", "threshold"),
        _is("a state and its estimate can decay to zero both", _ONE, quiet, "error", below=1e-6, kind="universal").quoting(_DECAY, "threshold"),
        _is("while the parameter of the system is not found", _ONE, quiet, "wrong", above=0.1).quoting(_DECAY, "threshold"),
        _is("an input that persists finds it", _ONE, "scalar system: random signs", "wrong", below=1e-6, kind="universal").quoting(_REMAIN, "threshold"),
        _is("under a constant input a system of order two is not found", _RICH, constant, "wrong", above=0.1).quoting(_CANNOT, "weaker"),
        _is("one frequency is not enough for it", _RICH, "linear system: one frequency", "wrong", above=0.1).quoting(_FREQUENCIES, "threshold"),
        _is("two are", _RICH, rich, "wrong", below=1e-3).quoting(_FREQUENCIES, "threshold"),
        _is(
            "the outputs under a constant input do not tell how the system works",
            _RICH, constant, "least_squares", above=1e-3, kind="universal",
        ).quoting(_CANNOT, "threshold"),
        Claim(
            "with noise in the outputs least squares is more than three times worse under the constant input than under two frequencies",
            _OWN,
            "log10 of its distance from the true value, constant input minus two frequencies",
            (constant, rich),
            lambda n: math.log10(n[constant].noisy / n[rich].noisy),
            above=math.log10(3),
        ),
        _is("a stochastic gradient that is scaled down too fast misses the optimum", _ONE, fast, "wrong", above=0.1).quoting(_QUICKLY, "threshold"),
        _is("one that is scaled down like 1/t gets there", _ONE, slow, "wrong", below=0.1).quoting(_QUICKLY, "ours"),
        _is("more than one bandit in a hundred that stops exploring misses the better arm", _ONE, stops, "wrong", above=0.01).quoting(_BANDIT_ARM, "threshold"),
        _is("fewer of those that continue exploring do", _ONE, "bandit: goes on exploring", "wrong", below=0.01).quoting(_REMAIN, "threshold"),
        _is("the weight behind the node is not learned from the training points", _NODE, "node: plain", "wrong", above=0.99, kind="exact").quoting("how the output of this node is propagated in h_{L←m} will not be observed at all", "threshold"),
        _is("nor if inputs are perturbed: their extremes leave most of it", _NODE, exact, "wrong", above=0.5).quoting(_SUFFICE, "threshold"),
        _is("with perturbed inputs the search of Algorithm 1 moves the output of the node", _NODE, "node: input excited", "seen", above=0.01, kind="universal").quoting("the output of the node of interest will be in the range [−ϵ², ϵ²]", "ours"),
        _is("perturbing every layer excites it, and training removes it", _NODE, every, "wrong", below=0.05).quoting(_EVERY, "threshold"),
        Claim(
            "removing the mean leaves a bias B", _CENTRE, "log10 of the size of B, mean removed", (mean,),
            lambda n: math.log10(n[mean].bias), above=-6.0,
        ).quoting(_MEAN, "threshold"),
        _is("and a poor margin, below half of the optimal one", _CENTRE, mean, "margin", below=0.5).quoting("having a poor margin is unavoidable when the crossentropy loss is used for low-dimensional data sets", "threshold"),
        _is("knowing the support vectors removes B", _CENTRE, known, "bias", below=1e-6, kind="universal").quoting(_KNOWN, "threshold"),
        _is("and gives the optimal margin", _CENTRE, known, "margin", above=0.999, kind="universal").quoting(_KNOWN, "ours"),
        Claim(
            "removing the mean is a gain at least, against an origin elsewhere",
            _OWN,
            "margin over the optimal one, mean removed minus origin elsewhere",
            (mean, elsewhere),
            lambda n: n[mean].margin - n[elsewhere].margin,
            above=0.0,
        ),
    ]  # fmt: skip


WORDS = {
    "wrong": "distance from the true value",
    "error": "remaining error",
    "least_squares": "distance from the true value of least squares",
    "noisy": "the same with noise",
    "seen": "largest output of the node over ε²",
    "bias": "size of B",
    "margin": "margin over the optimal one",
}


def _is(text: str, source: str, variant: str, name: str, **bounds: Any) -> Claim:
    return Claim(
        text, source, f"{WORDS[name]}, {variant}", (variant,), lambda n: float(getattr(n[variant], name)), **bounds
    )


FADING, PERSISTENT, BETWEEN = COLOURS[1], COLOURS[2], COLOURS[3]
FLOOR = 1e-16  # smaller distances are rounding
# title, y axis, whether it is logarithmic, and the experiment's variants with their colours and dashes
PANELS: dict[str, tuple[str, str, bool, dict[str, tuple[str, str]]]] = {
    "regression": (
        "Regression, measurements\nmultiplied by α each step",
        "distance of θ from the truth",
        True,
        {"attenuated quickly": (FADING, "--"), "attenuated slowly": (BETWEEN, "-."), "persistent": (PERSISTENT, "-")},
    ),
    "scalar system": (
        "x ← θx + u,\nθ learnt from the error",
        "distance of θ from the truth",
        True,
        {"no input": (FADING, "--"), "random signs": (PERSISTENT, "-")},
    ),
    "linear system": (
        "System of order two,\nfour numbers to learn",
        "distance from the true value",
        True,
        {"constant input": (FADING, "--"), "one frequency": (BETWEEN, "-."), "two frequencies": (PERSISTENT, "-")},
    ),
    "stochastic gradient": (
        "Stochastic gradient,\nobjective scaled down",
        "distance from the optimum",
        True,
        {"scaled down too fast": (FADING, "--"), "not scaled": (BETWEEN, "-."), "scaled down slowly": (PERSISTENT, "-")},
    ),
    "bandit": (
        "Two-armed bandits",
        "share that prefers the worse arm",
        False,
        {"stops exploring": (FADING, "--"), "goes on exploring": (PERSISTENT, "-")},
    ),
    "node": (
        "A node x₁x₂ that no\ntraining point excites",
        "weight behind the node",
        False,
        {
            "plain": (FADING, "--"),
            "input excited": (COLOURS[4], ":"),
            "input excited exactly": (BETWEEN, "-."),
            "every layer excited": (PERSISTENT, "-"),
        },
    ),
}  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.2, 7.2), layout="constrained")
    axes = figure.subplots(2, 4).ravel()
    for axis, (experiment, (title, label, logarithmic, lines)) in zip(axes, PANELS.items()):
        for how, (colour, dashes) in lines.items():
            _curve(axis, details[f"{experiment}: {how}"], how, colour, dashes)
        axis.set(title=title, xlabel="steps", ylabel=label, xscale="log")
        axis.set(**({"yscale": "log", "ylim": (FLOOR / 3, 3)} if logarithmic else {"ylim": (0, 1.1)}))
        if experiment == "stochastic gradient":
            axis.set_ylim(1e-3, 2)
        if experiment == "bandit":
            axis.set_ylim(0, 0.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="best")
    _boundaries(axes[6], details["centring: mean removed"][0])
    _margins(axes[7], numbers)
    figure.suptitle(f"{study.title} (scale {scale.name})", fontsize=13)
    return {"figure": ("Experiments with an excitation that fades and with one that persists", figure)}


def _curve(axis: Axes, seeds: Sequence[Mapping[str, Any]], label: str, colour: str, dashes: str) -> None:
    at = 1 + np.array(seeds[0]["at"])
    curves = np.maximum(np.array([seed["curve"] for seed in seeds], dtype=float), FLOOR)
    axis.plot(at, np.median(curves, 0), color=colour, linestyle=dashes, linewidth=2, label=label)
    axis.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)


def _boundaries(axis: Axes, panel: Mapping[str, Any]) -> None:
    """The points of one seed with their mean at the origin, where descent ends and where the margin is widest."""
    points, signs = np.array(panel["points"]), np.array(panel["signs"])
    for sign, marker in ((1, "o"), (-1, "s")):
        axis.plot(
            *points[signs == sign].T, marker, color="#888" if sign > 0 else "#222", markersize=4, linestyle="none"
        )
    limit = 1.15 * np.abs(points).max()
    for name, label, colour, dashes in (
        ("limit", "gradient descent", FADING, "--"),
        ("best", "widest margin", PERSISTENT, "-"),
    ):
        *weight, bias = panel[name]
        w = np.array(weight)
        foot, along = -bias * w / (w @ w), np.array([-w[1], w[0]]) / np.linalg.norm(w)
        ends = np.stack([foot - 3 * limit * along, foot + 3 * limit * along])
        axis.plot(*ends.T, color=colour, linestyle=dashes, linewidth=2, label=label)
    axis.plot(0, 0, "k+", markersize=12, label="mean of the points")
    axis.set(title="Cross-entropy on points\nwhose mean is removed", xlim=(-limit, limit), ylim=(-limit, limit))
    axis.set_aspect("equal")
    axis.legend(fontsize=8, loc="lower right")


def _margins(axis: Axes, numbers: Sequence[VariantResult]) -> None:
    hows = {"origin elsewhere": BETWEEN, "mean removed": FADING, "support vectors centred": PERSISTENT}
    for row, (how, colour) in enumerate(hows.items()):
        values = [number.margin for number in numbers if number.variant == f"centring: {how}"]
        axis.plot(values, [row] * len(values), "o", color=colour, alpha=0.6, markeredgewidth=0)
        axis.plot([float(np.mean(values))], [row], "|", color="k", markersize=18, markeredgewidth=2)
    axis.set_yticks(range(3), [how.replace(" ", "\n", 1) for how in hows])
    axis.set(
        title="Margin by place of the origin\n(one dot per seed, bar: mean)",
        xlabel="margin over the optimal one",
        xlim=(0, 1.05),
    )
    axis.set_ylim(2.5, -0.5)
    axis.grid(axis="x", alpha=0.3)


STUDY = Study(
    "excitation-basics",
    "What is not excited is not learnt",
    "section 1.1 of Persistency of Excitation for Robustness of Neural Networks, with the arguments of sections 3.1 and 5.2",
    "Small synthetic systems",
    Computed(
        compute,
        {name: (heading, "{:.2g}") for name, heading in WORDS.items()},
        draw,
        (
            "Orange and dashed: the excitation fades or is missing. Blue: it persists. Green: something between. Curves are medians\n"
            "over seeds, bands show the range over seeds; the axis of steps is logarithmic. In the last two panels\n"
            "gradient descent on the cross-entropy ends at the orange line, the widest margin is at the blue one."
        ),
        (
            "Means over seeds, with the range. *Distance from the true value*: of the parameters, relative to their size; for the stochastic\n"
            "gradient relative to the distance at the start; for bandits the fraction that prefers the worse arm; for the node the weight after it, which was 1\n"
            "and which no training point excites. *Remaining error*: what the algorithm itself sees at the\n"
            "end: of its predictions, the size of the last gradient, for bandits the loss per pull, for the node that of the clean points."
        ),
        (
            "Regression: 30 points in three dimensions, multiplied by α = 0.9, 0.99 or 1 after every step.",
            "Systems: x ← θx + u with an estimate that runs beside it; one of order two, at rest before, learned by normalized gradient "
            "steps, and by least squares over all steps without noise and with noise of 0.01.",
            "Stochastic gradient: least squares that no θ fits, scaled by 0.98 each step, by 1/(1 + t/50), or not.",
            "Bandits: arms that pay with 0.35 and 0.65; the one with the lower estimate is pulled with a frequency of 10/t² or 10/t.",
            "Node: f = w·(x₃, x₄, x₅) + c x₁x₂ + b on points with x₁ = x₂ = 0, radius 0.05. The search of Algorithm 1 starts at zero, "
            "where x₁x₂ has no gradient, so it never moves the node; *exactly* takes the true extremes of the output instead.",
            "Centring: two rings of 20 points as in figure 2, left; the limit of gradient descent is the hyperplane of least ‖w‖² + b².",
        ),
    ),
    SCALES,
    variants,
    claims,
    asks="is the unexcited unlearned?",
    seconds={"quick": 46, "paper": 490},
    sources=("persistency:section 1.1", "persistency:section 3.1", "persistency:section 5.2",),
)  # fmt: skip
