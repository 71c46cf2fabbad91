"""Files of weights: what is read, what is refused, and which names do not fit."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from excite import InputError, ModelError, RunError
from excite.runs import Run
from excite.train.models.weights import load_weights, read_weights


def network(width=4):
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("inside", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("old", [False, True])
def test_files_of_torch_save(tmp_path, inside, old):
    state = network().state_dict()
    torch.save(
        {"epoch": 3, inside: state} if inside else state, tmp_path / "w.pt", _use_new_zipfile_serialization=not old
    )
    stored = read_weights(tmp_path / "w.pt")
    assert (stored.step, stored.source.factory) == (-1, None)
    assert stored.state.keys() == state.keys()


def test_safetensors_and_checkpoints(tmp_path):
    state = network().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    assert read_weights(tmp_path / "w.safetensors").state.keys() == state.keys()
    with Run.create(tmp_path / "run", {}) as run:
        checkpoint = run.save_checkpoint(5, {"model": state, "optimizer": {}})
        other = run.save_checkpoint(6, {"weights": state})
    stored = read_weights(checkpoint.path)
    assert (stored.step, stored.state.keys()) == (5, state.keys())
    with pytest.raises(RunError, match="holds no model"):
        read_weights(other.path)


def test_torchscript_is_refused_in_words_of_its_own(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on Python 3.14
        torch.jit.save(torch.jit.script(nn.Linear(2, 1)), str(tmp_path / "w.pt"))
    with pytest.raises(InputError, match="is refused: it is a TorchScript archive") as error:
        read_weights(tmp_path / "w.pt")
    assert "weights_only" not in str(error.value)


@pytest.mark.parametrize("how", ["alone", "inside", "old", "module"])
def test_malicious_pickles_never_run(tmp_path, how):
    marker, path = tmp_path / "executed", tmp_path / "w.pt"
    content = {"alone": Evil(marker), "inside": {"0.weight": torch.ones(1), "x": Evil(marker)}}.get(how, Evil(marker))
    if how == "module":
        content = network()
        content.evil = Evil(marker)
    torch.save(content, path, _use_new_zipfile_serialization=how != "old")
    with pytest.raises(
        InputError, match="is refused: it holds something else than tensors, which could run code"
    ) as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    assert not marker.exists()


def test_what_is_no_file_of_weights(tmp_path):
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({}, tmp_path / "nothing.pt")
    with pytest.raises(RunError, match="there is no file"):
        read_weights(tmp_path / "none.pt")
    for name in ("text.pt", "empty.pt"):
        with pytest.raises((RunError, InputError)) as error:
            read_weights(tmp_path / name)
        assert "\n" not in str(error.value)
    for name in ("list.pt", "nothing.pt"):
        with pytest.raises(InputError, match="expected a state_dict, tensors by name"):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net.", "module.module."])
def test_prefixes_of_wrappers_are_removed(prefix):
    model, other = network(), network()
    load_weights(other, {prefix + name: value for name, value in model.state_dict().items()}, "w.pt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    assert not other.training


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "2.bias"}, "w.pt does not fit the Sequential: missing 2.bias"),
        (lambda s: {**s, "3.bias": torch.ones(1)}, "w.pt does not fit the Sequential: unexpected 3.bias"),
        (
            lambda s: {**s, "0.weight": torch.ones(5, 2)},
            "w.pt does not fit the Sequential: of another shape 0.weight (5, 2) instead of (4, 2)",
        ),
        (
            lambda s: {f"a{i}": torch.ones(1) for i in range(9)},
            "w.pt does not fit the Sequential: missing 0.weight, 0.bias, 2.weight and 1 more; unexpected a0, a1, a2 and 6 more",
        ),
    ],
)
def test_which_names_do_not_fit_in_one_line(state, said):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError) as error:
        load_weights(model, state(dict(network().state_dict())), Path("w.pt"))
    assert str(error.value) == said
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
