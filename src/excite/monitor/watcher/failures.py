"""Probes that raised: they are switched off, training continues."""

from __future__ import annotations

import re
from contextlib import suppress

from torch import nn

from excite._core.checks import all_finite
from excite._core.distributed import rank_and_size
from excite._core.warn import warn_user
from excite.errors import ExciteError
from excite.probes import Probe


class ProbeFailures:
    """Switches probes off that raised, and warns of them together.

    With several processes a probe that raised in one of them waits until all of them know, since the others wait for its values.

    Args:
        probes: The attached probes; those that raised are removed from this list.
        strict: Whether exceptions are raised instead.

    Attributes:
        muted: Names of the probes that raised in this process and are no longer measured.
    """

    def __init__(self, probes: list[Probe], strict: bool):
        self.muted: set[str] = set()
        self._probes, self._strict = probes, strict
        self._failures: list[tuple[str, int, Exception]] = []  # by probe and step

    def raised(self, probe: Probe, step: int, error: Exception) -> None:
        """Notes an exception of a probe, or raises it.

        Args:
            probe: The probe.
            step: The step at which it raised.
            error: The exception.
        """
        if self._strict:
            raise error
        self._failures.append((probe.name, step, error))
        self.muted.add(probe.name)
        if rank_and_size()[1] == 1:
            self._remove(probe)

    def switch_off(self, probe: Probe, step: int, error: Exception | None) -> None:
        """Removes a probe that raised in this process (with its exception) or in another one (without)."""
        if probe not in self._probes:
            return
        if error is not None:
            self._failures.append((probe.name, step, error))
        elif probe.name not in self.muted:
            warn_user(f"probe {probe.name!r} is switched off: it raised in another process")
        self._remove(probe)

    def warn(self, model: nn.Module | None) -> None:
        """Warns once of all probes that raised for the same reason, such as a model that does not run on the data.

        Args:
            model: The model, to see whether training has diverged; None where that cannot be seen.
        """
        if not self._failures:
            return
        failures, self._failures = self._failures, []
        diverged = model is not None and not _finite(model)
        by_reason: dict[object, list[tuple[str, int, Exception]]] = {}
        for failure in failures:
            by_reason.setdefault(diverged or _reason(failure[2]), []).append(failure)
        for same in by_reason.values():
            names = [name for name, _, _ in same]
            _, step, error = same[0]
            message = str(error) if isinstance(error, ExciteError) else f"{type(error).__name__}: {error}"
            if diverged:
                message = "the weights are not finite, since training has diverged"
            who = f"probe {names[0]!r} is" if len(names) == 1 else f"probes {', '.join(map(repr, names))} are"
            raised = "it raised" if len(names) == 1 else "the first raised"
            warn_user(f"{who} switched off, training continues; at step {step} {raised}: {message}")

    def _remove(self, probe: Probe) -> None:
        self._probes.remove(probe)
        with suppress(Exception):
            probe.detach()


def _finite(model: nn.Module) -> bool:
    """Whether all weights are; where they are not, what probes raise says nothing about its cause."""
    return all(bool(all_finite(p)) for p in model.parameters() if not p.is_meta)


def _reason(error: BaseException) -> tuple[type[BaseException], str]:
    """The first cause of an exception, without numbers: probes run the model on different numbers of samples."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error), re.sub(r"\d+", "#", str(error))
