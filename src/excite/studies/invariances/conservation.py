"""Study `conservation`: the seven cases of Theorem 1, linear and ReLU, on and off the diagonal, descent and flow.

Networks without biases with one output, in float64; the paper has no experiment on the theorem, sizes and data are ours.
The seed determines points, labels and first weights. Gradient descent is booked by the ledger, so its numbers are what is left
once Σ η² of the squared gradients (appendix F) is subtracted. Gradient flow is integrated with control of its error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from excite.probes import conservation
from excite.probes.conserved.off_diagonal import law_matrix
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train.dynamics.flow import gradient_flow
from excite.wiring import Group, trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CASES = {  # words, and the layers whose channels the case is about
    1: ("fully connected", ("a",)),
    2: ("convolutions", ("a",)),
    3: ("inside a residual block", ("Y",)),
    4: ("between free residual blocks", ("U",)),
    5: ("convolution to fully connected", ("a",)),
    6: ("convolution to residual block", ("a",)),
    7: ("residual block and fully connected", ("a", "U")),
}
KINDS = ("linear", "ReLU")
ROUNDING = 1e-12
RTOL = 1e-7  # error of a step of gradient flow, relative to the weights
INTEGRATION = 10 * RTOL  # of squared weights: the sum of the errors of hundreds of steps, which partly cancel


@dataclass(frozen=True, kw_only=True)
class CasesScale(StepsScale):
    """Steps, points and time of gradient flow."""

    points: int
    time: float


SCALES = {
    "quick": CasesScale(name="quick", seeds=3, steps=200, points=8, time=1.0, words="200 steps, flow to time 1"),
    "paper": CasesScale(name="paper", seeds=5, steps=3000, points=20, time=10.0, words="3,000 steps, flow to time 10"),
}  # fmt: skip


class Net(nn.Module):
    """The network of a case. Blocks are r(x) = σ(U σ(Y x) + Z x), in case 3 with the identity in place of Z."""

    def __init__(self, case: int, relu: bool):
        super().__init__()
        self.case, self.act = case, nn.ReLU() if relu else nn.Identity()

        def line(before: int, after: int) -> nn.Module:
            return nn.Linear(before, after, bias=False)

        convolves = case in (2, 5, 6)
        self.a: nn.Module = nn.Conv1d(2, 3, 3, bias=False) if convolves else line(4, 5)
        width = 12 if convolves else 5  # of 3 channels, 4 places
        if case == 2:
            self.b: nn.Module = nn.Conv1d(3, 4, 2, bias=False)
            width = 12
        if case in (1, 5):
            self.b = line(width, 4)
            width = 4
        if case in (3, 4, 6, 7):
            after = width if case == 3 else 4
            self.Y, self.U = line(width, 3), line(3, after)
            self.Z = nn.Identity() if case == 3 else line(width, after)
            width = after
        if case == 4:
            self.Y2, self.U2, self.Z2 = line(width, 3), line(3, 4), line(width, 4)
        self.last = line(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module."""
        x = self.act(self.a(x))
        if self.case in (2, 1):
            x = self.act(self.b(x))
        x = x.flatten(1)
        if self.case == 5:
            x = self.act(self.b(x))
        if self.case in (3, 4, 6, 7):
            x = self.act(self.U(self.act(self.Y(x))) + self.Z(x))
        if self.case == 4:
            x = self.act(self.U2(self.act(self.Y2(x))) + self.Z2(x))
        return self.last(x)[:, 0]  # type: ignore[no-any-return]


def start(settings: Mapping[str, Any], seed: int) -> tuple[Net, Tensor, Tensor]:
    """Network and data of a case, for a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net(settings["case"], settings["relu"]).double()
    shape = (2, 6) if settings["case"] in (2, 5, 6) else (4,)
    x = torch.randn(settings["points"], *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (settings["points"],), generator=generator).double() * 2 - 1
    return model, x, y


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    model, x, y = start(settings, seed)
    wiring = trace(model, x)
    names = CASES[settings["case"]][1]
    groups = [group for group in wiring.groups if group.producers[0].layer in names]
    flowed = flow(model, x, y, groups, settings["time"])
    on_progress(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    first = {path: p.detach().clone() for path, p in model.named_parameters()}
    steps, curve = settings["steps"], []
    measured_steps = {int(1.25**k) for k in range(60)} | {steps}
    with conservation(model, optimizer, wiring=wiring, off_diagonal=True) as ledger:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if step in measured_steps:
                report = ledger.read()
                own = [report[name] for name in names]
                apart = [entry.off_diagonal for entry in own if entry.off_diagonal is not None]
                curve.append((step, max(e.relative for e in own), max(m.relative for m in apart)))
                on_progress(0.3 + 0.7 * step / steps)
    moved = sum(float((p - first[path]).square().sum().detach()) for path, p in model.named_parameters()) ** 0.5
    size = sum(float(w.square().sum()) for w in first.values()) ** 0.5
    values = {
        "diagonal": curve[-1][1],
        "off": curve[-1][2],
        "slack": max(entry.moved for entry in own),
        "flow_diagonal": flowed[0],
        "flow_off": flowed[1],
        "flow_left": flowed[2],
        "moved": moved / size,
        "printed": printed(model, first) if settings["case"] == 6 else float("nan"),
    }
    return Outcome(values, {"curve": curve})


def flow(
    model: Net, x: Tensor, y: Tensor, groups: list[Group], time: float, rtol: float = RTOL
) -> tuple[float, float, float]:
    """Largest change of the law's matrix along gradient flow, on and off the diagonal, relative to its scale.

    And on the diagonal, at the end, the largest change less that of the descent steps which the flow takes where it cannot follow a
    kink: with the sign, channel by channel, Σ η² of squared gradients of producers minus consumers (appendix F).
    """

    def matrices(model: nn.Module) -> Tensor:
        parameters = dict(model.named_parameters())
        return torch.cat([law_matrix(group, parameters).flatten() for group in groups])

    def loss(model: nn.Module) -> Tensor:
        return (model(x) - y).square().mean()  # type: ignore[no-any-return]

    # Where paths cross kinks all the time, an integrator of order 5 gets further than one of order 8.
    course = gradient_flow(
        model, loss, time, at=20, quantities={"laws": matrices},
        method="RK45", rtol=rtol, atol=rtol / 1000, shortest=time / 2000,
    )  # fmt: skip
    changes = torch.as_tensor(course.values["laws"] - course.values["laws"][0])
    drift, ended = changes.abs().amax(0), changes[-1]
    on, off, left, at = 0.0, 0.0, 0.0, 0
    parameters = {path: p.detach() for path, p in course.model.named_parameters()}
    moves = {path: squares.sqrt() for path, squares in course.squares.items()}
    for group in groups:
        n = group.channels
        own, last, at = drift[at : at + n * n].view(n, n), ended[at : at + n * n].view(n, n), at + n * n
        scale = float(sum(s.rows(parameters[s.parameter]).square().sum() for s in (*group.producers, *group.consumers)))
        on = max(on, float(own.diagonal().max()) / scale)
        left = max(left, float((last - law_matrix(group, moves)).diagonal().abs().max()) / scale)
        off = max(off, float((own - own.diagonal().diag()).max()) / scale)
    return on, off, left


def printed(model: Net, first: Mapping[str, Tensor]) -> float:
    """Case 6 as printed: the convolution against the columns of [U Z] that it has, Z alone. Relative change."""

    def law(w: Mapping[str, Tensor]) -> Tensor:
        read = w["Z.weight"].T.reshape(3, -1)
        return (w["a.weight"].flatten(1).square().sum(1) - read.square().sum(1)).detach()

    trained = dict(model.named_parameters())
    scale = trained["a.weight"].square().sum() + trained["Z.weight"].square().sum()
    return float(((law(trained) - law(first)).abs().max() / scale).detach())


def name(case: int, activation: str) -> str:
    """Name of the variant."""
    return f"{case} {CASES[case][0]}, {activation}"


def variants(scale: CasesScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    common = {"steps": scale.steps, "points": scale.points, "time": scale.time, "lr": 0.02}
    return [
        Variant(name(case, activation), {**common, "case": case, "relu": activation == "ReLU"})
        for case in CASES
        for activation in KINDS
    ]


_QUOTES = {
    "Training invariances, Theorem 1": "we have the following matrix-wise invariance for a.e. time t ≥ 0: "
    "W_2(t)'W_2(t) − W_1(t)W_1(t)' = W_2(0)'W_2(0) − W_1(0)W_1(0)'",
    "Training invariances, appendix F": "With slight modifications to the proof technique, one can show all the results for Theorem 1, "
    "Theorem 2 and Corollary 1",
}


def claims(scale: CasesScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""

    def worst(activation: str, number: str, text: str, source: str, below: float) -> Claim:
        own = tuple(name(case, activation) for case in CASES)
        measure = f"largest relative change over the seven cases, {activation}"
        return Claim(
            text, source, measure, own, lambda n: max(getattr(n[a], number) for a in own), below=below, kind="exact"
        ).quoting(_QUOTES[source])

    def smallest(activation: str, number: str, text: str, source: str, below: float) -> Claim:
        own = tuple(name(case, activation) for case in CASES)
        measure = f"log₁₀ of the smallest relative change over the seven cases, {activation}"

        def effect(n: Mapping[str, VariantResult]) -> float:
            return math.log10(min(getattr(n[a], number) for a in own))

        return Claim(text, source, measure, own, effect, below=math.log10(below)).quoting(_QUOTES[source], "weaker")

    theorem_1, f = _QUOTES
    six = name(6, "ReLU")
    return [
        worst("linear", "diagonal", "linear: descent conserves the diagonal, up to η² squared gradients", f, ROUNDING),
        worst("ReLU", "diagonal", "ReLU: descent conserves the diagonal, up to η² squared gradients", f, ROUNDING),
        worst("linear", "off", "linear: and all entries off the diagonal", f, ROUNDING),
        smallest("ReLU", "off", "ReLU: and all entries off the diagonal, in one case at least", f, ROUNDING),
        worst("linear", "flow_left", "linear: gradient flow conserves the diagonal", theorem_1, INTEGRATION),
        worst(
            "ReLU",
            "flow_left",
            "ReLU: gradient flow conserves the diagonal, up to its sliding",
            theorem_1,
            INTEGRATION,
        ),
        worst("linear", "flow_off", "linear: and all entries off the diagonal", theorem_1, INTEGRATION),
        smallest(
            "ReLU", "flow_off", "ReLU: and all entries off the diagonal, in one case at least", theorem_1, INTEGRATION
        ),
        Claim(
            "case 6 holds with [U Z] as printed",
            theorem_1,
            f"{six}: log₁₀ of the relative change of the diagonal, with Z in place of [Y; Z]",
            (six,),
            lambda n: math.log10(n[six].printed),
            below=-4.0,
            kind="universal",
        ).quoting("W_1 convolutional, […] and W_2 is a rearrangement of [U Z]"),
    ]


_FLOOR = 1e-18
_LINES = {
    ("linear", 1): (COLOURS[2], "-", "linear, diagonal"),
    ("linear", 2): (COLOURS[6], "--", "linear, off the diagonal"),
    ("ReLU", 1): (COLOURS[3], "-", "ReLU, diagonal"),
    ("ReLU", 2): (COLOURS[1], "--", "ReLU, off the diagonal"),
}


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    cases: dict[str, dict[str, Any]] = {}
    for variant, seeds in details.items():
        case, _, activation = variant.rpartition(", ")
        cases.setdefault(case, {})[activation] = seeds[0]["curve"]
    columns = min(4, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 1 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    for axis, (case, lines) in zip(axes.flat, cases.items()):
        for (activation, column), (colour, dashes, label) in _LINES.items():
            if activation in lines:
                steps = [row[0] for row in lines[activation]]
                left = [max(row[column], _FLOOR) for row in lines[activation]]
                axis.plot(steps, left, color=colour, linestyle=dashes, linewidth=1.8, label=label)
        axis.set(xscale="log", yscale="log", ylim=(_FLOOR, 10))
        axis.set_title(case, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative change\nthat η² does not explain")
    for axis in axes.flat[max(len(cases) - columns, 0) : len(cases)]:  # the lowest of every column
        axis.set_xlabel("step of gradient descent")
        axis.tick_params(labelbottom=True)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: entries of W₁W₁' − W₂'W₂ over training", figure)}


STUDY = Study(
    "conservation",
    "What training conserves: the seven cases of Theorem 1",
    "Theorem 1 and appendix F of Training Invariances and the Low-Rank Phenomenon (the paper has no figure of it)",
    "Random points with random labels, squared error",
    Computed(
        compute,
        {
            "diagonal": ("diagonal, descent", "{:.1e}"),
            "off": ("off the diagonal, descent", "{:.1e}"),
            "slack": ("diagonal before that", "{:.1e}"),
            "flow_diagonal": ("diagonal, flow", "{:.1e}"),
            "flow_left": ("less its descent steps", "{:.1e}"),
            "flow_off": ("off the diagonal, flow", "{:.1e}"),
            "moved": ("weights moved by", "{:.0%}"),
        },
        draw,
        "The largest change of an entry of W₁W₁' − W₂'W₂ since the start, less the slack of appendix F, relative to the squared weights:\n"
        "gradient descent, first seed. Lines at the bottom are rounding. On the diagonal the law holds in every case, for linear and for\n"
        "ReLU networks. Off the diagonal it holds for linear networks; with ReLU it fails from the first steps.",
        "Means over seeds, with the range. Changes are relative to the squared norm of all weights around the channels. *Diagonal\n"
        "before that* is its drift before the slack is subtracted. Flow ends with the error of the integrator, and of the\n"
        "short descent steps it takes where it cannot follow a kink; *less its descent steps* is the change at the end less what these steps\n"
        "explain, channel by channel and with its sign: Σ η² of the squared gradients of producers minus that of consumers.",
        ("Squared error, mean over points; learning rate 0.02; float64; networks without biases and with one output.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "W₂ of case 5 is (d·l) × c: every place of a channel counts. W₂ of case 6 is [Y; Z].",
        "The residual blocks of case 3 have the identity in the skip; cases 4, 6 and 7 have a free matrix there.",
        "Gradient flow with ReLU slides along several kinks at once. An earlier version took normals that depend on each other on the surface for "
        "independent ones where it was off the surface by 1e-10, and two of 35 flows left 1.6e-6 and 2.7e-6: an error of the integrator, which did not fall "
        "with its tolerance. Now what is left does.",
    ),
    asks="what does training conserve?",
    seconds={"quick": 29, "paper": 1190},
    sources=(
        "invariances:Theorem 1",
        "invariances:appendix F",
    ),
)
