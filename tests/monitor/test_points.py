"""Points drawn from tensors, datasets and loaders, without disturbing them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import excite.data
from excite import InputError
from excite.monitor.points import Points, as_called, draw, draw_parts

X, Y = torch.arange(100.0).reshape(50, 2), torch.arange(50) % 3


class Noisy(Dataset):
    """Random numbers of all global generators and of one of its own in every item."""

    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 30

    def __getitem__(self, i):
        noise = torch.rand(()) + random.random() + np.random.rand() + self.own.random()  # noqa: NPY002
        return X[i] + noise, int(Y[i])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))


def dicts(batch):
    return {"pixel_values": torch.stack([x for x, _ in batch]), "labels": torch.tensor([y for _, y in batch])}


SOURCES = {
    "tensors": (X, Y),
    "arrays": [X.numpy(), Y.numpy()],
    "labels (N, 1)": (X, Y[:, None]),
    "dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
    "three items": DataLoader(TensorDataset(X, Y, torch.arange(50)), batch_size=7),
    "dicts": DataLoader(list(zip(X, Y)), batch_size=7, collate_fn=dicts),
    "workers": DataLoader(TensorDataset(X, Y), batch_size=7, num_workers=1),
    "stream": DataLoader(Stream(), batch_size=7),
    "iterable dataset": Stream(),
    "list of batches": [(X[:20], Y[:20]), (X[20:], Y[20:]), (X[:0], Y[:0])],
    "list of samples": list(zip(X, Y)),
    "whole batches": DataLoader([(X[:20], Y[:20]), (X[20:], Y[20:])], batch_size=None),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_points_keep_their_labels_whatever_they_come_from(kind):
    drawn = draw(SOURCES[kind], "train", 40)
    assert drawn.x.shape == (40, 2)
    assert drawn.y.tolist() == (drawn.x[:, 0] / 2 % 3).long().tolist()
    assert len(drawn.x.unique(dim=0)) == 40
    assert drawn.key == ("pixel_values" if kind == "dicts" else None)
    assert torch.equal(draw(SOURCES[kind], "train", 40).x, drawn.x)  # the same again
    assert len(draw(SOURCES[kind], "train", 500)) == 50  # smaller than asked


def test_the_sampler_of_a_loader_says_which_points_there_are():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(20, 30)))
    assert sorted((draw(loader, "train").x[:, 0] / 2).tolist()) == list(range(20, 30))
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=[[1, 2], [3]])
    assert sorted((draw(loader, "train").x[:, 0] / 2).tolist()) == [1, 2, 3]


def test_no_random_number_of_the_user_is_drawn():
    def first(touch):
        data = Noisy()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        if touch:
            draw(loader, "train", 20), draw(data, "test", 5)
        return torch.cat([x for x, _ in loader])

    assert torch.equal(first(False), first(True))


def test_a_data_set_of_excite_has_both_parts():
    data = excite.data.load("digits", classes=(0, 1), train=30, test=20)
    drawn = draw_parts(data, None)
    assert {part: len(points) for part, points in drawn.items()} == {"train": 30, "test": 20}


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ((pair for pair in zip(X, Y)), "can be read only once"),
        (iter(DataLoader(TensorDataset(X, Y))), "can be read only once"),
        (TensorDataset(X), "expected batches that are pairs"),
        (DataLoader(X), "have no labels"),
        (DataLoader([{"x": x} for x in X]), "no labels in batches with keys 'x'"),
        (DataLoader([{"a": x, "b": x, "label": 0} for x in X]), "'a', 'b' is the input cannot be determined"),
        (TensorDataset(X, X), "one label per point"),
        ((X, Y[:4]), "one label per point"),
        ((X[:0], Y[:0]), "at least one point"),
        (DataLoader([(torch.zeros(i + 1), 0) for i in range(3)], batch_size=3), "raised"),
        (TensorDataset(X, X[:, :1], Y), None),
        ({"x": X}, "expected a pair of tensors"),
        (7, "expected a pair of tensors"),
        (X, "expected a pair of tensors"),
        ((X, None), "labels y as a tensor or array of class indices; got None for y"),
        ((X, ["cat"] * len(X)), "labels y as a tensor or array"),
        ((X,), "got a tuple of 1"),
    ],
    ids=range(17),
)
def test_what_cannot_be_sampled_is_refused_in_one_line(source, match):
    if match is None:  # (x, y, z) with one number per point as y: taken as labels
        assert len(draw(source, "train")) == 50
        return
    with pytest.raises(InputError, match=match) as refused:
        draw(source, "train")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("train: ")


def test_train_and_test_have_one_shape():
    with pytest.raises(InputError, match=r"one shape; got \(2,\) and \(1,\)"):
        draw_parts((X, Y), (X[:, :1], Y))


def test_a_key_is_a_keyword_only_where_the_model_takes_it():
    class Named(nn.Module):
        def forward(self, image):
            return image

    class Any_(nn.Module):
        def forward(self, **inputs):
            return inputs

    drawn = {"train": Points(torch.rand(2, 3), torch.zeros(2), "image")}
    for model, key in ((Named(), "image"), (Any_(), "image"), (nn.Sequential(nn.Linear(3, 2)), None)):
        assert as_called(drawn, model)["train"].key == key
