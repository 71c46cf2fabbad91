"""A model that is trained while the trajectory probe measures it."""

from __future__ import annotations

import torch

import excite
from excite._core.calls import pick_output


def squared(f, y):
    return (f.reshape(len(f), -1) - y).square().mean()


class Training:
    """A model under watch; `step` trains once on (x, y) and returns what the probe measured."""

    def __init__(self, model, x, probe, optimizer=None, loss=squared):
        self.model, self.probe, self.loss = model, probe, loss
        self.optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.values = {}
        measure = probe.measure

        def kept(now):
            self.values = {k: float(v) for k, v in measure(now).items()}
            return self.values

        probe.measure = kept
        self.watch = excite.watch(model, example=x, probes=[probe], strict=True)

    def step(self, x, y, pick=None):
        self.optimizer.zero_grad()
        loss = self.loss(pick_output(self.model(x), pick), y)
        loss.backward()
        self.optimizer.step()
        self.watch.step(loss)
        return self.values

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.watch.close()
