"""Values of one measurement, on the device they came from until somebody needs them as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from excite.errors import InputError
from excite.runs.checks import is_name


class Measured:
    """Values by name, in memory of their own: a view of a weight would show the weight of a later step.

    Tensors on a device are copied together, and later fetched together: one kernel and one transfer for all of them.
    """

    def __init__(self, values: Mapping[str, object]):
        self._numbers: dict[str, float] = {}
        self._stacks: list[tuple[list[str], Tensor]] = []
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
        for name, value in values.items():
            if not is_name(name):
                raise InputError(f"expected keys such as 'norm' or 'norm/fc1'; got {name!r}")
            if type(value) is float:  # most of them
                self._numbers[name] = value
            elif isinstance(value, Tensor) and value.numel() == 1:
                value = value.detach() if value.requires_grad else value
                whole = getattr(value, "full_tensor", None)  # of a DTensor, as FSDP has them
                value = value if whole is None else whole()
                if value.device.type == "cpu":
                    self._numbers[name] = float(value)
                    continue
                names, tensors = kinds.setdefault((value.device, value.dtype), ([], []))
                names.append(name)
                tensors.append(value.reshape(()))
            elif isinstance(value, int | float):
                self._numbers[name] = float(value)
            else:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InputError(f"{name}: expected one number; got {what}")
        self._names = list(values)
        for names, tensors in kinds.values():
            self._stacks.append((names, torch.stack(tensors)))

    def __len__(self) -> int:
        return len(self._names)

    @property
    def here(self) -> bool:
        """Whether nothing has to be fetched."""
        return not self._stacks

    @staticmethod
    def fetch(several: Sequence[Measured]) -> list[dict[str, float]]:
        """The numbers of each, in the order they were given."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for one in several:
            for _, stack in one._stacks:
                kinds.setdefault((stack.device, stack.dtype), []).append(stack)
        fetched = {kind: iter(torch.cat(stacks).tolist()) for kind, stacks in kinds.items()}
        result = []
        for one in several:
            if not one._stacks:
                result.append(one._numbers)
                continue
            found = dict(one._numbers)
            for names, stack in one._stacks:
                values = fetched[(stack.device, stack.dtype)]
                found |= {name: float(next(values)) for name in names}
            result.append({name: found[name] for name in one._names})
        return result
