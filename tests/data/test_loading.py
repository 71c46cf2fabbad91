from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from excite.data import BUILT_IN, DOWNLOADED, NAMES, load
from excite.data.fetching import is_right
from excite.data.images import idx
from excite.data.sources import SOURCES
from excite.errors import DataError, InputError

SYNTHETIC = ["boundaries", "linear-margins-1", "linear-margins-2", "frequencies", "moons"]


@pytest.mark.parametrize("name", ["digits", *SYNTHETIC])
def test_the_same_arguments_give_the_same_bits(name: str) -> None:
    first, second = load(name, seed=3), load(name, seed=3)
    for part in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(first, part), getattr(second, part))


@pytest.mark.parametrize("name", ["digits", "boundaries", "linear-margins-2", "frequencies", "moons"])
def test_another_seed_gives_other_points(name: str) -> None:
    assert not torch.equal(load(name, seed=1).x_train, load(name, seed=2).x_train)


def test_loading_consumes_no_global_randomness() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    for name in ("digits", *SYNTHETIC):
        load(name)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_digits_are_split_by_class_without_overlap() -> None:
    from sklearn.datasets import load_digits

    data, original = load("digits"), load_digits()
    assert len(data.x_train) + len(data.x_test) == 1797
    together = torch.cat([data.x_train, data.x_test]).flatten(1)
    expected = torch.from_numpy(original.data).float() / 8 - 1
    assert torch.equal(together.sort(0).values, expected.sort(0).values)
    for digit, total in enumerate(np.bincount(original.target)):
        assert int((data.y_test == digit).sum()) == round(total / 2)
    assert data.x_train.shape[1:] == (1, 8, 8)
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.float32, torch.int64)
    assert data.bounds == (-1, 1)


def test_classes_become_labels_in_the_given_order() -> None:
    every, pair, swapped = load("digits"), load("digits", classes=(3, 8)), load("digits", classes=(8, 3))
    assert torch.equal(pair.x_train[pair.y_train == 1], every.x_train[every.y_train == 8])
    assert torch.equal(pair.x_train[pair.y_train == 0], every.x_train[every.y_train == 3])
    assert torch.equal(pair.y_train, 1 - swapped.y_train)
    assert (pair.classes, swapped.classes) == (("3", "8"), ("8", "3"))


def test_sizes_are_balanced_and_nested() -> None:
    small, large = load("digits", classes=(3, 8), train=21, test=10), load("digits", classes=(3, 8), train=100)
    assert small.y_train.bincount().tolist() == [11, 10]
    assert small.y_test.bincount().tolist() == [5, 5]
    inside = (small.x_train.flatten(1)[:, None] == large.x_train.flatten(1)[None]).all(-1).any(1)
    assert bool(inside.all())


def test_scale_is_what_the_extreme_pixels_become() -> None:
    data = load("digits", scale=(0, 3))
    assert (float(data.x_train.min()), float(data.x_train.max()), data.bounds) == (0.0, 3.0, (0.0, 3.0))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "digit"}, "did you mean 'digits'"),
        ({"name": "imagenet"}, "expected one of"),
        ({"name": "digits", "classes": (3, 10)}, "no class 10"),
        ({"name": "digits", "classes": (3, -1)}, "no class -1"),
        ({"name": "digits", "classes": (3, True)}, "no class True"),
        ({"name": "digits", "classes": (3, 3)}, "different"),
        ({"name": "digits", "classes": (3,)}, "at least two"),
        ({"name": "digits", "classes": "38"}, "at least two"),
        ({"name": "digits", "classes": (3, 8), "train": 1000}, "ask for at most"),
        ({"name": "digits", "train": 0}, "train: expected"),
        ({"name": "digits", "test": 2.5}, "test: expected"),
        ({"name": "digits", "seed": -1}, "seed"),
        ({"name": "digits", "scale": (1, 0)}, "scale"),
        ({"name": "digits", "scale": (0, math.nan)}, "scale"),
        ({"name": "digits", "scale": 3}, "scale"),
        ({"name": "digits", "omega": 1.0}, "no option"),
        ({"name": "moons", "omega": 1.0}, "its options: noise"),
        ({"name": "moons", "noise": -1.0}, "noise"),
        ({"name": "moons", "classes": (0, 1)}, "do not apply"),
        ({"name": "moons", "train": 1}, "train"),
        ({"name": "linear-margins-1", "train": 10}, "leave train and test out"),
    ],
)
def test_bad_options_are_refused(arguments: dict, match: str) -> None:
    with pytest.raises(InputError, match=match) as error:
        load(**arguments)
    assert "\n" not in str(error.value)


def test_boundaries_are_where_the_paper_has_them() -> None:
    data = load("boundaries", train=4000)
    x, y = data.x_train.double(), data.y_train
    assert y.bincount().tolist() == [2000, 2000]
    for points, center in ((x[y == 0], (7, 19)), (x[y == 1][:1000], (0, 5)), (x[y == 1][1000:], (11, 27))):
        assert torch.allclose(points.mean(0), torch.tensor(center).double(), atol=0.06)
        assert torch.allclose(points.std(0), torch.full((2,), 0.5).double(), atol=0.05)
    assert load("boundaries").y_train.bincount().tolist() == [8, 8]


def test_linear_margins_follow_their_formulas() -> None:
    x = load("linear-margins-1").x_train.double()
    for i in range(20):
        t = 2 * math.pi * i / 20
        assert x[i].tolist() == pytest.approx([-35 + 58 * math.cos(t), -35 + 58 * math.sin(t - math.pi / 8)], abs=1e-4)
        assert x[20 + i].tolist() == pytest.approx(
            [35 + 35 * math.cos(t), 35 + 35 * math.sin(t - math.pi / 2.3)], abs=1e-4
        )
    second = load("linear-margins-2")
    u, y = second.x_train[:, 0], second.y_train
    assert torch.allclose(second.x_train[:, 1], 10 + 20 * u)
    assert bool(((u[y == 0] <= 2) & (u[y == 0] >= 1.2)).all())
    assert bool(((u[y == 1] <= 4) & (u[y == 1] >= 3.2)).all())
    assert len(second.x_test) == 0


@pytest.mark.parametrize("omega", [0.25, 1.0])
def test_frequencies_are_the_formula_on_an_embedded_square(omega: float) -> None:
    data = load("frequencies", omega=omega, seed=5)
    x = torch.cat([data.x_train, data.x_test]).double()
    y = torch.cat([data.y_train, data.y_test]).double()
    # Both parts lie in one plane, at the distances of the square times ten; find the coordinates again up to rotation.
    _, singular, _ = torch.linalg.svd(x)
    assert float(singular[2]) < 1e-4 * float(singular[1])
    assert float(x.norm(dim=1).max()) <= 10 * math.sqrt(2) + 1e-4
    rng = np.random.default_rng([5, 2])
    q, r = np.linalg.qr(rng.standard_normal((10, 2)))
    z = x.numpy() @ (q * np.sign(np.diag(r))) / 10
    expected = np.cos(2 * np.pi * omega * z[:, 0]) * np.cos(2 * np.pi * omega * z[:, 1])
    assert np.allclose(y.numpy(), expected, atol=1e-5)
    assert data.classes == ()


def test_test_points_do_not_depend_on_the_number_of_training_points() -> None:
    for name in ("moons", "frequencies", "boundaries"):
        assert torch.equal(load(name, train=20).x_test, load(name, train=50).x_test)


def test_offline_data_says_how_to_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path))
    for name in ("cifar10", "mnist"):
        with pytest.raises(DataError, match=f"excite data fetch {name}") as error:
            load(name)
        assert "EXCITE_DATA" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_damaged_cached_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"\0" * 30730000)
    with pytest.raises(DataError, match="expected SHA-256"):
        load("cifar10", root=tmp_path)


def test_idx_files() -> None:
    content = b"\0\0\x08\x02" + (2).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(range(6))
    assert idx(content, "x").tolist() == [[0, 1, 2], [3, 4, 5]]
    for bad in (content[:-1], content + b"x", content[:6], b"", b"\0\0\x09\x01" + content[4:]):
        with pytest.raises(DataError):
            idx(bad, "x")


def have(name: str) -> bool:
    """Whether EXCITE_DATA holds the set already; nothing is downloaded by tests."""
    root = os.environ.get("EXCITE_DATA")
    source = SOURCES[name]
    return root is not None and all(is_right(Path(root) / source.folder / f.name, f) for f in source.files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_the_real_sets_if_they_are_there(name: str) -> None:
    if not have(name):
        pytest.skip(f"set EXCITE_DATA to a folder with {name}")
    data = load(name, classes=(0, 7), test=100)
    shape, count = ((3, 32, 32), [5000, 5000]) if name == "cifar10" else ((1, 28, 28), [5923, 6265])
    assert data.shape == shape
    assert data.y_train.bincount().tolist() == count
    assert (float(data.x_train.min()), float(data.x_train.max())) == (-1, 1)
    assert data.classes == (("airplane", "horse") if name == "cifar10" else ("0", "7"))


def test_all_names_are_known() -> None:
    assert set(NAMES) == {"digits", "cifar10", "mnist", *SYNTHETIC}


def test_names_are_those_built_in_and_those_downloaded() -> None:
    assert sorted(NAMES) == sorted([*BUILT_IN, *DOWNLOADED])
    assert "digits" in BUILT_IN
    assert {"cifar10", "mnist"} <= set(DOWNLOADED)
