"""One step of stochastic gradient descent for all networks of an ensemble at once, written out by hand.

Small networks spend their time between operations, not in them: autograd and an optimizer call some hundred of them
per step. Here a step is about five per layer, into memory that is allocated already. With S networks, B points per step and K steps:

    forward    z_l = h_l W_lᵀ,  h_{l+1} = ρ(z_l) beside a column of ones
    backward   d_l = dL/dz_l;   d_{l−1} = (d_l W_l) · ρ'(z_{l−1})
    update     W_l ← W_l − lr · d_lᵀ h_l

Without momentum and decay lr is a factor of d from the start, so that the update is one operation. What a trajectory
needs (d, the outputs, the biases) is written into buffers that hold K steps, and read once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from excite.train.cuda_graph import CaptureStream, NotCapturable
from excite.train.vectorized.perceptrons import Perceptrons

Loss = Literal["half-squared", "bce"]
_SMALL = 2**20  # multiplications in a layer's product from which on a second thread pays


@dataclass(frozen=True)
class SGDSettings:
    """loss and torch.optim.SGD's settings; `lr` is (S,)."""

    loss: Loss
    lr: Tensor
    momentum: float
    weight_decay: float

    @property
    def plain(self) -> bool:
        """Whether there is neither momentum nor weight decay."""
        return self.momentum == 0 and self.weight_decay == 0


class Steps:
    """Memory for K steps, and how they are done. `watched`: layers whose d and bias are kept, from the first."""

    def __init__(self, networks: Perceptrons, rule: SGDSettings, batch: int, steps: int, watched: int):
        self.networks, self.rule, self.steps, self.watched = networks, rule, steps, watched
        form, count = networks.form, networks.count
        widths = form.sizes[1:]

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=form.dtype, device=form.device)

        # Inputs of a step: its points, their targets, and the factor of their derivatives (0 for points that only
        # fill up a smaller last batch).
        self.inputs = buffer(steps, count, batch, widths[0] if form.fixed else form.sizes[0] + 1)
        self.targets = buffer(steps, count, batch, 1)
        self.factors = buffer(steps, count, batch, 1)
        # Results of a step.
        self.outputs = buffer(steps, count, batch, 1)
        self.d = [buffer(steps if layer < watched else 1, count, batch, n) for layer, n in enumerate(widths)]
        self.biases = [buffer(steps + 1, count, n) for n in widths[:watched]]
        # Working memory.
        self._h = [torch.cat([buffer(count, batch, w.shape[2] - 1), networks.ones(layer, count, batch, 1)], 2)
                   for layer, w in enumerate(networks.weights)]  # fmt: skip
        self._z = [buffer(count, batch, n) for n in widths[:-1]]
        self._g = [buffer(count, batch, n) for n in widths[:-1]]
        self._slope = buffer(count, batch, 1)
        if not rule.plain:
            self._gradient, self._velocity = torch.zeros_like(networks.flat), torch.zeros_like(networks.flat)
            self._gradients = networks.views(self._gradient, networks.shapes)
            rates = [rule.lr[:, None, None].expand(shape).flatten() for shape in networks.shapes]
            self._rates = torch.cat(rates)
        self._cut()

    def _cut(self) -> None:
        """Views of everything, made once: slicing costs as much as multiplying."""
        weights = self.networks.weights
        self._turned = [w.mT for w in weights]  # (S, in + 1, out)
        self._without = [w[:, :, :-1] for w in weights]
        self._bias = [w[:, :, -1] for w in weights]
        self._signal = [h[:, :, :-1] for h in self._h]
        self._at = list(zip(self.inputs, self.targets, self.factors, self.outputs))
        self._d = [list(d) for d in self.d]
        self._bias_columns = [list(column) for column in self.biases]

    def run(self, steps: int) -> None:
        """The first `steps` of the K steps whose inputs, targets and factors are filled in."""
        for column, bias in zip(self._bias_columns, self._bias):
            column[0].copy_(bias)
        for step in range(steps):
            self._step(step)

    def _step(self, step: int) -> None:
        weights, turned, signal, z = self.networks.weights, self._turned, self._signal, self._z
        activations, fixed = self.networks.form.activations, self.networks.form.fixed
        x, y, factor, f = self._at[step]
        last = len(weights) - 1
        h = [x if not fixed else self._h[0], *self._h[1:]]
        d = [deltas[step if layer < self.watched else 0] for layer, deltas in enumerate(self._d)]
        for layer in range(last + 1):
            out = f if layer == last else z[layer]
            if layer == 0 and fixed:
                torch.add(x, turned[0], out=out)
            else:
                torch.bmm(h[layer], turned[layer], out=out)
            if layer < last:
                activations[layer].apply(out, signal[layer + 1])
        if self.rule.loss == "bce":
            f = torch.sigmoid(f, out=self._slope)
        torch.sub(f, y, out=self._slope)
        torch.mul(self._slope, factor, out=d[last])
        for layer in range(last, -1, -1):
            if layer:
                torch.bmm(d[layer], self._without[layer], out=self._g[layer - 1])
                activations[layer - 1].pull(self._g[layer - 1], z[layer - 1], signal[layer], d[layer - 1])
            self._update(layer, weights[layer], d[layer].mT, h[layer])
        if not self.rule.plain:
            self._descend()
        for column, bias in zip(self._bias_columns, self._bias):
            column[step + 1].copy_(bias)

    def _update(self, layer: int, weights: Tensor, d: Tensor, h: Tensor) -> None:
        """d (S, out, B), h (S, B, in + 1)."""
        if not self.rule.plain:
            torch.bmm(d, h, out=self._gradients[layer])
        elif h.shape[1] == 1:
            weights.addcmul_(d, h, value=-1)  # an outer product
        else:
            weights.baddbmm_(d, h, alpha=-1)

    def _descend(self) -> None:
        """The update of torch.optim.SGD: v ← momentum · v + gradient + weight_decay · w, w ← w − lr · v."""
        flat = self.networks.flat
        if self.rule.weight_decay:
            self._gradient.add_(flat, alpha=self.rule.weight_decay)
        self._velocity.mul_(self.rule.momentum).add_(self._gradient)
        flat.addcmul_(self._velocity, self._rates, value=-1)


@contextmanager
def few_threads(networks: Perceptrons, batch: int) -> Iterator[None]:
    """On the CPU, one thread where products are small: several would wait for each other longer than they work."""
    before = torch.get_num_threads()
    small = max(w.numel() for w in networks.weights) * batch < _SMALL
    try:
        if small and networks.form.device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


class CapturedWindow:
    """The steps of a whole window as one CUDA graph; the first window runs plainly, as training like any other."""

    def __init__(self, steps: Steps, measured: bool):
        self.steps = steps
        self.why_not = "capture=False" if not measured else None if steps.outputs.is_cuda else "not on a CUDA device"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = CaptureStream(steps.outputs.device) if self.why_not is None else None
        self._warm = False

    def __call__(self, k: int) -> None:
        """Does k steps by replaying the captured graph where there is one."""
        if self._stream is None or self.why_not is not None or k < self.steps.steps:
            self.steps.run(k)
            return
        with torch.cuda.device(self.steps.outputs.device):
            if not self._warm:
                self._stream.run(lambda: self.steps.run(k))
                self._warm = True
                return
            if self._graph is None:
                try:
                    self._graph, _ = self._stream.capture(lambda: self.steps.run(k))
                except NotCapturable as error:  # nothing ran yet: the window is done plainly
                    self.why_not = str(error)
                    self.steps.run(k)
                    return
            self._graph.replay()
