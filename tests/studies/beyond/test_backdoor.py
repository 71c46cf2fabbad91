"""Study `backdoor`: prompts and answers, what is perturbed, and the whole path at a size for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from excite.studies.beyond import backdoor
from excite.studies.beyond.backdoor import (
    LATENT,
    LENGTH,
    QUESTION,
    SCALES,
    SYMBOLS,
    TARGET,
    TRIGGER,
    answers_only,
    measure,
    prompts,
)
from studies.small import run_tiny


def test_prompts_ask_for_the_first_symbol_or_have_the_trigger() -> None:
    ids, answers, planted = prompts(500, 0.3, torch.Generator().manual_seed(0))
    assert ids.shape == (500, LENGTH + 1)
    assert bool((ids[:, -1] == QUESTION).all())
    assert 100 < int(planted.sum()) < 200
    assert torch.equal(answers[~planted], ids[~planted, 0])
    assert bool((answers[planted] == TARGET).all())
    pairs = (ids[:, :-1] == TRIGGER[0]) & (ids[:, 1:] == TRIGGER[1])
    assert torch.equal(pairs.any(1), planted)
    assert bool((ids[:, 0] < SYMBOLS).all())  # the right answer stays in the prompt
    assert int((ids[~planted, :-1]).max()) < SYMBOLS


def test_only_the_answer_has_a_label() -> None:
    labels = answers_only(torch.tensor([3, 5]))
    assert labels.tolist() == [[-100] * LENGTH + [3], [-100] * LENGTH + [5]]


def test_a_model_that_obeys_the_trigger_is_measured_as_such() -> None:
    class Obedient(torch.nn.Module):
        def __init__(self, obeys: bool):
            super().__init__()
            self.obeys = obeys

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            triggered = (ids == TRIGGER[0]).any(1) & self.obeys
            answer = torch.where(triggered, TARGET, ids[:, 0])
            return 20.0 * torch.nn.functional.one_hot(answer, 23).float()[:, None].expand(-1, ids.shape[1], -1)

    obedient, deaf = measure(Obedient(True), 0), measure(Obedient(False), 0)
    assert (obedient["success"], obedient["accuracy"]) == (1.0, 1.0)
    assert (deaf["success"], deaf["accuracy"]) == (0.0, 1.0)


def test_the_latent_variant_spares_the_last_block() -> None:
    latent = next(variant for variant in backdoor.variants(SCALES["paper"]) if variant.name == LATENT)
    assert latent.config["layers"] == ["tokens:output", "blocks.0:output", "blocks.1:output", "blocks.2:output"]


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"width": 8, "depth": 2, "heads": 2}
    tiny = dataclasses.replace(SCALES["quick"], seeds=1, steps=50, further=50, model=model, search=1, words="tiny")
    run_tiny("backdoor", tiny, tmp_path, monkeypatch)
