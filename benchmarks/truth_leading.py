"""Accuracy of σ₁, searched from the last result, of the first convolution, and how layers are aligned.

    python -m benchmarks.truth_leading [--measurements 8] [--every 50] [--rate 0.05]

The papers' network learns the sign of a projection of random images, so that directions come to lead that did not before.
Errors are those of what the default probes of watch write, against singular values of whole matrices in float64.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.ledger import make
from benchmarks.timing import machine
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.sites import find
from excite.probes.layer_alignment.probe import AlignmentSearch
from excite.wiring.junctions import parameters_of
from excite.wiring.tracing import trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=int, default=8)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rate", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make("papers-cnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    template = torch.nn.functional.interpolate(torch.randn(1, 3, 4, 4), size=(32, 32), mode="bilinear")
    template /= template.norm()
    example = torch.randn(4, 3, 32, 32)
    wiring, site = trace(model, example), find(model, example).first
    followed, some, whole = LayerOperator(site), AlignmentSearch(wiring, 32, 8), AlignmentSearch(wiring, 4096, 8)
    print(f"The papers' network, learning rate {options.rate}, measured every {options.every} steps; {machine()}\n")
    print(
        "| step | loss | σ₁ | error of σ₁ | as stated | largest error of ratio | of alignment |\n|---|---|---|---|---|---|---|"
    )
    for step in range(options.measurements * options.every + 1):
        x = torch.randn(50, 3, 32, 32)
        y = (x * template).sum((1, 2, 3)).sign()
        optimizer.zero_grad()
        loss = (model(x + 3 * y[:, None, None, None] * template)[:, 0] - y).square().mean()
        loss.backward()
        if step % options.every == 0:
            truth = LayerOperator(site).largest(1e-6, max_products=2000)[0]
            sigma, stated = followed.follow().result()
            (layers, met), (exact, aligned) = (search.begin(parameters_of(model))() for search in (some, whole))
            ratio = max(
                abs(layers[name].squares[0] / row.squares[0] - 1) for name, row in exact.items() if row.squares[0] > 0
            )
            off = max(abs(met[name].value - one.value) for name, one in aligned.items())
            cells = f"{truth:.3f} | {sigma / truth - 1:+.1e} | {stated:.0e} | {ratio:.0e} | {off:.3f}"
            print(f"| {step} | {float(loss.detach()):.3f} | {cells} |", flush=True)
        optimizer.step()


if __name__ == "__main__":
    main()
