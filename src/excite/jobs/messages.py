"""Where work on other machines writes how far it is. A module of its own: its process need not import torch."""

from __future__ import annotations

Message = tuple[str, str, float]


class Messages:
    """The last message of every piece of work since the last look."""

    def __init__(self) -> None:
        self.kept: dict[str, Message] = {}

    def put(self, name: str, phase: str, share: float) -> None:
        self.kept[name] = (name, phase, share)

    def take(self) -> list[Message]:
        taken, self.kept = list(self.kept.values()), {}
        return taken
