"""Weights stored with how to build the model: exact, readable by others, damage noticed."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import excite
from excite import InputError, RunError
from excite.runs import Run, weights
from excite.runs.import_paths import ModelSource


class Tied(nn.Module):
    """Tied weights, a buffer of integers, a parameter without elements, a frozen one in half precision."""

    def __init__(self, width=3):
        super().__init__()
        self.encode, self.decode = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.decode.weight = self.encode.weight
        self.norm = nn.BatchNorm1d(width)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.frozen = nn.Parameter(torch.ones(2).half(), requires_grad=False)

    def forward(self, x):
        return self.decode(self.norm(self.encode(x)))


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        yield run


def test_stored_and_read_again_bit_by_bit(run):
    model = Tied()
    run.log(7, {"x": 1.0})
    path = run.save(model)
    assert path == run.path / "artifacts/model.safetensors"
    stored = weights.read(path)
    assert (stored.step, stored.source) == (7, ModelSource(f"{__name__}:Tied", {}))
    assert stored.state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(stored.state[name], value)
        assert stored.state[name].dtype == value.dtype
    again = Tied()
    again.load_state_dict(stored.state)
    assert again.decode.weight is again.encode.weight


def test_other_programs_read_the_file(run):
    model = nn.Linear(2, 3)
    path = run.save(model, nn.Linear, {"in_features": 2, "out_features": 3})
    assert torch.equal(load_file(path)["weight"], model.weight)


def test_wrappers_are_left_out(run):
    model = Tied()
    compiled = torch.compile(nn.Sequential(model), backend="eager")
    inner = nn.Sequential(torch.compile(Tied(), backend="eager"))
    for wrapped in (compiled, nn.DataParallel(nn.Sequential(model)), inner):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            path = run.save(wrapped)
        assert "Sequential() without arguments builds another model" in str(said[0].message)
        assert weights.read(path).state.keys() == nn.Sequential(Tied()).state_dict().keys()


def test_one_line_says_what_is_missing(run):
    with pytest.warns(
        UserWarning, match=r"Linear takes in_features, out_features\): pass factory=.*--model MODULE:FACTORY"
    ):
        path = run.save(nn.Linear(2, 2), step=3)
    assert weights.read(path).source.missing == "Linear takes in_features, out_features"


def test_what_cannot_be_stored(run, tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(InputError, match=r"state '_extra_state': only tensors can be stored; got dict"):
        run.save(Extra(2, 2), nn.Linear)
    with pytest.raises(InputError, match=r"only tensors with values"):
        run.save(nn.Linear(2, 2, device="meta"), nn.Linear)
    with pytest.raises(InputError, match=r"expected a torch.nn.Module|expected a model"):
        run.save({"weight": torch.ones(2)})
    with pytest.raises(InputError, match="step"):
        run.save(Tied(), step=-1)
    assert not (run.path / weights.NAME).exists()
    run.save(Tied())
    with pytest.raises(RunError, match="open for reading"):
        excite.load_run(run.path).save(Tied())


def damaged(path, change):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    about = json.loads(header["excite"])
    change(tensors, about)
    save_file(tensors, path, {"format": "pt", "excite": json.dumps(about)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, about: tensors["frozen"].add_(1), "checksum differs"),
        (lambda tensors, about: about.update(factory="os:system"), "checksum differs"),
        (lambda tensors, about: about.update(step="x"), "header cannot be read"),
        (lambda tensors, about: about.update(options=3), "header cannot be read"),
        (lambda tensors, about: about.update(format="other"), "header cannot be read"),
        (lambda tensors, about: about.update(version=9), "format version 9.*upgrade Excite"),
    ],
)
def test_damage_is_noticed(run, change, said):
    path = run.save(Tied())
    damaged(path, change)
    with pytest.raises(RunError, match=said):
        weights.read(path)


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(RunError, match="there is no file"):
        weights.read(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(RunError, match=r"damaged or not a safetensors file"):
        weights.read(tmp_path / "text.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "foreign.safetensors")
    stored = weights.read(tmp_path / "foreign.safetensors")
    assert (stored.step, stored.source.factory) == (-1, None)
