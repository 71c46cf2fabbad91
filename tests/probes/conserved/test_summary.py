"""Summaries of a ledger against its entries."""

from __future__ import annotations

import pytest
import torch

from excite import InputError
from excite.probes import Ledger, conservation
from excite.probes.conserved.summary import Summarizer
from excite.probes.conserved.update_terms import PARTS as ALL_PARTS
from models import build
from probes.conserved.trainings import followed, train


@pytest.mark.parametrize("name", ["mlp", "convolutional", "conv1d"])
def test_the_digest_says_what_the_entries_say(name: str) -> None:
    model, x = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 4)
        summary, reading = ledger.summary(), ledger.read()
        assert list(summary.names) == [entry.name for entry in reading.entries]
        for k, entry in enumerate(reading.entries):
            assert float(summary.drift[k]) == pytest.approx(entry.moved, rel=1e-12)
            assert float(summary.residual[k]) == pytest.approx(entry.relative, rel=1e-6, abs=1e-15)
            for row, part in enumerate(ALL_PARTS):
                assert float(summary.fractions[row, k]) == pytest.approx(entry.share(part), rel=1e-9, abs=1e-12)
                assert bool(summary.occurs[row, k]) == bool((entry.terms[part] != 0).any())


def test_snapshots_are_summarized_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    summary = Summarizer.summary
    monkeypatch.setattr(Summarizer, "summary", lambda self, state: (sizes.append(len(state)), summary(self, state))[1])
    snapshots = followed(5, Ledger.snapshot)
    with pytest.raises(InputError, match="not committed"):
        snapshots[0].summary()
    (ledger, last), *_ = reversed(followed(5, lambda ledger: (ledger, ledger.snapshot())))
    ledger.commit()
    assert last.summary() is last.summary()
    assert sizes == [5]
