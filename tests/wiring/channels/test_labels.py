"""Classes of labels, and relations between their factors."""

from __future__ import annotations

import torch

from excite.wiring.channels.labels import ZERO, Break, Classes, Relations


def test_joined_labels_share_what_is_known_about_them() -> None:
    classes = Classes()
    a, b = classes.fresh(3), classes.fresh(3)
    classes.pin(b[:1], Break("reason"))
    classes.unite(a, b, "{} is added")
    assert [classes.find(int(label)) for label in b] == a.tolist()
    assert classes.fixed(int(a[0]))
    assert not classes.fixed(int(a[1]))


def test_what_never_scales_pins_a_channel_and_zero_does_not() -> None:
    classes = Classes()
    a = classes.fresh(2)
    classes.unite(a, torch.tensor([classes.source("the model's input"), ZERO]), "{} is added")
    assert classes.state(int(a[0])).pinned_by == Break("the model's input is added")
    assert classes.state(int(a[1])).pinned_by is None


def test_labels_along_an_axis_are_joined() -> None:
    classes = Classes()
    labels = classes.fresh(6).view(2, 3)
    reduced = classes.reduce(labels, [1], "")
    assert reduced.shape == (2, 1)
    assert len({classes.find(int(label)) for label in labels[0]}) == 1
    assert classes.find(int(labels[0, 0])) != classes.find(int(labels[1, 0]))


def test_a_product_scales_by_the_product_of_its_factors() -> None:
    classes = Classes()
    relations = Relations(classes)
    a, b = classes.fresh(1), classes.fresh(1)
    c = relations.product([a, b], Break("product"))
    relations.solve()
    (x, y, z) = (int(label) for label in (a, b, c))
    assert sorted(map(sorted, (d.items() for d in relations.directions()))) == [[(x, 1), (z, 1)], [(y, 1), (z, 1)]]
