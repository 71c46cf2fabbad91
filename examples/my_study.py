"""A study of your own: does training with persistent excitation widen the margins of a small network in the plane?

    excite study run examples/my_study.py
    excite study show examples/my_study.py

The file defines `STUDY`: a function from settings and a seed to numbers, the variants to compare, and the claims, written
before the result is known. Everything else is as for the studies of the papers: workers, resuming, verdicts, results page.
"""

import torch

import excite
from excite.studies import Claim, experiment


def points(count, generator):
    """Two interleaved half circles with noise: (count, 2), labels 0 and 1."""
    label = torch.arange(count) % 2
    angle = torch.pi * (torch.rand(count, generator=generator) + label)
    centre = torch.stack([label.float(), 0.3 * label], 1)
    circle = torch.stack([angle.cos(), angle.sin()], 1) + centre
    return circle + 0.1 * torch.randn(count, 2, generator=generator), label


def train(settings, seed):
    """Trains one network and returns its numbers."""
    generator = torch.Generator().manual_seed(seed)
    x, y = points(100, generator)
    x_test, y_test = points(100, generator)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    excitation = excite.PersistentExcitation(model, radius=settings["radius"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        excitation.loss(x, y).backward()
        optimizer.step()
    margins = excite.margins(model, x_test, y_test, norm=2)
    right = ((model(x_test)[:, 0] > 0.5) == y_test).float().mean()
    return {"margin": margins.median, "accuracy": right}


CLAIMS = [
    Claim(
        "exciting every layer widens the margins of test points",
        "not in the papers",
        "median test margin, excited minus plain",
        ("plain", "excited"),
        lambda n: n["excited"].margin - n["plain"].margin,
        above=0.0,
    ),
    Claim(
        "and costs less than five points of accuracy",
        "not in the papers",
        "test accuracy, excited minus plain",
        ("plain", "excited"),
        lambda n: n["excited"].accuracy - n["plain"].accuracy,
        above=-0.05,
    ),
]

STUDY = experiment(
    "half-circles",
    "Margins of two half circles, with and without excitation",
    train,
    {"plain": {"radius": 0.0, "steps": 200}, "excited": {"radius": 0.1, "steps": 200}},
    CLAIMS,
    measures={"margin": "median margin of test points (2-norm)", "accuracy": "test accuracy"},
    seeds=4,
    asks="does excitation widen margins?",
)
