"""What a report says."""

import json

import pytest

from excite.probes.flight_recorder.event import SpikeEvent
from excite.probes.flight_recorder.spikes import Mover


def test_the_layer_that_moved_first_is_named():
    movers = [
        Mover("update", "", 90, 4, 2.0),
        Mover("update", "h.3.attn.c_attn", 90, 4, 3.0),
        Mover("m", "h.4.mlp", 92, 2, 2.0),
    ]
    event = SpikeEvent(
        100, 2.0, 2.1, float("nan"), movers, ("h.3.attn/head1", 8.0, 30.0), {"step": [99, 100], "loss": [2.0, None]}
    )
    assert event.first.layer == "h.3.attn.c_attn"
    text = str(event)
    assert "the update of h.3.attn.c_attn, 3 times its usual size at step 90, 4 steps before the loss" in text
    assert "h.3.attn/head1 grew from 8 to 30" in text
    assert any("QK-norm" in one for one in event.help)
    stored = json.loads(json.dumps(event.to_dict(), allow_nan=False))
    assert stored["first"]["layer"] == "h.3.attn.c_attn"
    assert stored["loss"] is None


@pytest.mark.parametrize(("quantity", "word"), [("gradient", "Clip"), ("residual", "residual"), ("m", "β₂")])
def test_help_depends_on_the_quantity(quantity, word):
    event = SpikeEvent(100, 2.0, 2.1, 5.0, [Mover(quantity, "h.3.mlp", 90, 4, 2.0)])
    assert any(word in one for one in event.help)


def test_without_movers_the_batches_are_to_blame():
    event = SpikeEvent(100, 2.0, 2.1, 5.0)
    assert "no recorded series moved" in str(event)
    assert "batches" in event.help[0]
    assert event.to_dict()["first"] is None


def test_a_loss_that_is_not_finite_from_the_start_has_no_rise():
    event = SpikeEvent(3, float("nan"), float("nan"), float("nan"))
    assert str(event) == "the loss is nan at step 3; no recorded series moved before it"
    assert event.to_dict()["before"] is None


def test_roles_are_named_behind_layers():
    roles = {"h.3.attn.c_attn": "layer 3, query, key and value", "h.3.attn/head1": "layer 3, head 1"}
    movers = [Mover("update", "h.3.attn.c_attn", 90, 4, 3.0)]
    event = SpikeEvent(100, 2.0, 2.1, 5.0, movers, ("h.3.attn/head1", 8.0, 30.0), roles=roles)
    assert "the update of h.3.attn.c_attn (layer 3, query, key and value), 3 times" in str(event)
    assert "the attention logits of h.3.attn/head1 (layer 3, head 1) grew" in str(event)
    assert "Lower the learning rate at h.3.attn.c_attn (layer 3, query, key and value)." in event.help
    assert event.to_dict()["first"]["role"] == "layer 3, query, key and value"
    assert event.to_dict()["head"]["role"] == "layer 3, head 1"
