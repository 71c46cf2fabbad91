"""The networks of an ensemble: fully connected networks of one form, and their weights side by side.

The layers of a network are z = W h + b. All networks' weights and biases of a layer are one tensor (S, out, in + 1) whose
last column is b and meets an input that is always 1: one product does both, and so do the gradient and the update.
A first layer whose weight is not trained has only that column; W x is computed once for all points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from excite._core.checks import check_model, check_placed
from excite.errors import InputError, ModelError
from excite.train.vectorized.activations import NAMES, Activation

_WANTED = f"nn.Sequential of nn.Linear with one activation between two of them ({NAMES}), at the end one output"


@dataclass(frozen=True)
class Form:
    """Architecture that networks trained together share."""

    sizes: tuple[int, ...]  # inputs, then the width of each layer
    biased: tuple[bool, ...]
    fixed: bool  # the first layer's weight is not trained
    activations: tuple[Activation, ...]  # one less than layers
    sigmoid: bool  # the output is a probability
    dtype: torch.dtype
    device: torch.device


def read(model: nn.Module) -> tuple[Form, list[nn.Linear]]:
    """Form and affine layers of one network; refused if it is not one that can be trained in an ensemble."""
    layers: list[nn.Linear] = []
    activations: list[Activation] = []
    for name, module in _parts(model):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(f"{name} has hooks, which would not be called in an ensemble: remove them first")
        if type(module) is nn.Flatten and not layers:
            continue
        activation = Activation.of(module)
        if type(module) is nn.Linear and len(layers) == len(activations) and module not in layers:
            layers.append(module)
        elif activation is not None and len(layers) == len(activations) + 1:
            activations.append(activation)
        else:
            raise ModelError(f"an ensemble takes {_WANTED}; {name} ({type(module).__name__}) does not fit")
    sigmoid = len(activations) == len(layers) > 0 and activations[-1].kind is nn.Sigmoid
    if sigmoid:
        activations.pop()
    if len(layers) != len(activations) + 1 or layers[-1].out_features != 1:
        raise ModelError(f"an ensemble takes {_WANTED}; got {' '.join(str(model).split())[:160]}")
    for number, layer in enumerate(layers):
        if not (layer.weight.requires_grad or number == 0) or (layer.bias is not None and not layer.bias.requires_grad):
            raise ModelError("in an ensemble everything is trained, but for the weight of the first layer if you like")
    form = Form(
        sizes=(layers[0].in_features, *(layer.out_features for layer in layers)),
        biased=tuple(layer.bias is not None for layer in layers),
        fixed=not layers[0].weight.requires_grad,
        activations=tuple(activations),
        sigmoid=sigmoid,
        dtype=layers[0].weight.dtype,
        device=layers[0].weight.device,
    )
    return form, layers


def _parts(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if type(model) is nn.Sequential:
        for key, child in model.named_children():
            yield from _parts(child, f"{name}.{key}" if name else key)
    else:
        yield name or "the model", model


class Perceptrons:
    """The weights of S networks of one form, and what they compute."""

    def __init__(self, models: Sequence[nn.Module]):
        if not models:
            raise InputError("expected at least one network; got none")
        read_all = [read(check_placed(check_model(model, "models"))) for model in models]
        self.form = read_all[0][0]
        for number, (form, _) in enumerate(read_all):
            for field in fields(form):
                value, expected = getattr(form, field.name), getattr(self.form, field.name)
                if value != expected:
                    raise ModelError(f"the networks of an ensemble must be of one form: network {number} has {field.name} "
                                     f"{value} where the first has {expected}")  # fmt: skip
        self.count = len(models)
        self._layers = [list(layers) for layers in zip(*(layers for _, layers in read_all))]  # by layer, then network
        parameters = [p for layers in self._layers for layer in layers for p in layer.parameters()]
        if len(set(parameters)) < len(parameters):
            raise ModelError("networks of an ensemble must not share weights: build each of them separately")
        form = self.form
        inputs = [0 if form.fixed else form.sizes[0], *form.sizes[1:-1]]
        shapes = [(self.count, out, size + 1) for size, out in zip(inputs, form.sizes[1:])]
        numbers = [torch.Size(shape).numel() for shape in shapes]
        self.flat = torch.zeros(sum(numbers), dtype=form.dtype, device=form.device)  # all that is trained
        self.weights = self.views(self.flat, shapes)  # (S, out, in + 1) each
        self.shapes = shapes
        for weights, layers in zip(self.weights, self._layers):
            for own, layer in zip(weights, layers):
                if own.shape[1] > 1:
                    own[:, :-1] = layer.weight.detach()
                if layer.bias is not None:
                    own[:, -1] = layer.bias.detach()

    @staticmethod
    def views(flat: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Returns views of a flat tensor, one per layer."""
        chunks = flat.split([torch.Size(shape).numel() for shape in shapes])
        return [chunk.view(shape) for chunk, shape in zip(chunks, shapes)]

    def ones(self, layer: int, *shape: int) -> Tensor:
        """The input of the last column of a layer: 1, or 0 if it has no bias; that column then stays 0."""
        return torch.full(shape, float(self.form.biased[layer]), dtype=self.form.dtype, device=self.form.device)

    def prepare(self, x: Tensor) -> Tensor:
        """Points (1 or S, N, d) as the first layer takes them: with a 1 appended, or W x where W is not trained."""
        if self.form.fixed:
            first = torch.stack([layer.weight.detach() for layer in self._layers[0]])
            return x @ first.mT  # (S, N, out)
        return torch.cat([x, self.ones(0, *x.shape[:2], 1)], 2)  # (1 or S, N, d + 1)

    def outputs(self, prepared: Tensor) -> Tensor:
        """The last layer's output (S, N) for prepared points, before a sigmoid."""
        h = prepared
        for layer, weights in enumerate(self.weights):
            z = h + weights.mT if layer == 0 and self.form.fixed else h @ weights.mT
            if layer < len(self.form.activations):
                h = torch.empty_like(z)
                self.form.activations[layer].apply(z, h)
                h = torch.cat([h, self.ones(layer + 1, *h.shape[:2], 1)], 2)
        return z.squeeze(2)

    def write_back(self) -> None:
        """Put the weights into the models."""
        for weights, layers in zip(self.weights, self._layers):
            for own, layer in zip(weights, layers):
                if own.shape[1] > 1:
                    layer.weight.data.copy_(own[:, :-1])
                if layer.bias is not None:
                    layer.bias.data.copy_(own[:, -1])
