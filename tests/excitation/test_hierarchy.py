"""The hierarchy of binary classifiers: its shape, its decisions, and its loss node by node."""

import math

import pytest
import torch
from torch import nn

from excitation.refusing import refusing
from excite import Hierarchy, PersistentExcitation
from models import build, with_outputs

Y = torch.tensor([0, 4, 2, 3])


def descend(tree, right):
    """One point, literally: follow the decisions until one class is left."""
    group = set(range(tree.classes))
    for n, (left, right_) in enumerate(tree.nodes):
        if set(left) | set(right_) == group:
            group = set(right_ if right[n] else left)
    return group.pop()


@pytest.mark.parametrize("m", [2, 3, 4, 5, 7, 8, 10, 33, 100])
def test_balanced_has_m_minus_one_nodes_and_few_decisions(m):
    torch.manual_seed(m)
    for tree in (Hierarchy.balanced(m), Hierarchy.by_means(torch.randn(3 * m, 4), torch.arange(3 * m) % m, m)):
        assert len(tree.nodes) == m - 1
        assert tree.depth == math.ceil(math.log2(m))
        assert sorted(tree.nodes[0][0] + tree.nodes[0][1]) == list(range(m))
        right = torch.rand(20, m - 1) < 0.5
        assert tree.descend(right).tolist() == [descend(tree, row) for row in right]
        node, side, used = tree.tables()
        for c in range(m):
            for n, s, u in zip(node[c], side[c], used[c]):
                assert u == 0 or c in tree.nodes[n][int(s)]
            assert used[c].sum() == sum(c in left + right for left, right in tree.nodes)


def test_means_that_are_near_stay_together():
    centres = torch.tensor([[0.0, 0], [9, 9], [0, 1], [9, 8], [5, 5]])
    y = torch.arange(50) % 5
    torch.manual_seed(0)
    tree = Hierarchy.by_means(centres[y] + 0.01 * torch.randn(50, 2), y, 5)
    assert {frozenset(left) | frozenset(right) for left, right in tree.nodes} >= {frozenset({0, 2}), frozenset({1, 3})}


def test_given_groups_and_what_is_printed():
    tree = Hierarchy([(0, 1), [2, 3, 4]])
    assert tree.nodes == [((0, 1), (2, 3, 4)), ((0,), (1,)), ((2, 3), (4,)), ((2,), (3,))]
    assert str(tree).splitlines()[0] == "0: 0, 1 | 2, 3, 4"
    assert (tree.classes, tree.depth) == (5, 3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("name", ["mlp", "convolutional", "transformer-time-first"])
def test_the_loss_is_the_sum_of_the_binary_losses_on_the_path(name, norm, loss):
    model, x = build(name)
    model = with_outputs(model, 4).eval()
    tree = Hierarchy([[0, 1], [2, [3, 4]]])
    pe = PersistentExcitation(model, 0.1, norm=norm, classes=5, hierarchy=tree, loss=loss)
    total = 0
    for i, c in enumerate(Y.tolist()):
        for n, (left, right) in enumerate(tree.nodes):
            if c in left + right:
                node = PersistentExcitation(model, 0.1, norm=norm, loss=loss, output=lambda f, n=n: f[:, n])
                total = total + node.loss(x[i : i + 1], torch.tensor([int(c in right)])) / len(x)
    ours = pe.loss(x, Y)
    assert torch.allclose(ours, total, rtol=1e-9)
    gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (ours, total)]
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*gradients))
    low, high = pe.extremes(x)
    for n in range(4):
        expected = PersistentExcitation(model, 0.1, norm=norm, output=lambda f, n=n: f[:, n]).extremes(x)
        assert torch.allclose(low[:, n], expected[0], rtol=1e-9, atol=1e-12)
        assert torch.allclose(high[:, n], expected[1], rtol=1e-9, atol=1e-12)


def test_radius_zero_is_the_plain_sum_over_the_path():
    model, x = build("mlp")
    model, tree = with_outputs(model, 4), Hierarchy([[0, 1], [2, [3, 4]]])
    small, none = (PersistentExcitation(model, r, hierarchy=tree) for r in (1e-12, 0))
    assert torch.allclose(small.loss(x, Y), none.loss(x, Y))
    assert torch.equal(*none.extremes(x))


def test_two_classes_are_the_binary_problem():
    model, x = build("mlp")
    y = Y.clamp(max=1)
    assert torch.allclose(
        PersistentExcitation(model, 0.1, hierarchy="balanced", classes=2).loss(x, y),
        PersistentExcitation(model, 0.1).loss(x, y),
        rtol=1e-12,
    )


@pytest.mark.parametrize("name", ["dropout", "batchnorm", "transformer-dropout"])
def test_it_trains_random_and_normalized_models(name):
    model, x = build(name)
    model = with_outputs(model, 4)
    pe = PersistentExcitation(model, 0.1, hierarchy="balanced", classes=5)
    pe.loss(x, Y).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_predict_descends_and_training_learns():
    torch.manual_seed(0)
    x = torch.randn(90, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 2))
    pe = PersistentExcitation(model, 0.02, steps=1, hierarchy=Hierarchy.by_means(x, y, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(150):
        optimizer.zero_grad()
        pe.loss(x, y).backward()
        optimizer.step()
    assert (pe.predict(x) == y).float().mean() > 0.85
    assert pe.predict(x).tolist() == [descend(pe.target.hierarchy, row) for row in model(x) > 0.5]


def loss(outputs=4, y=Y, **options):
    return PersistentExcitation(nn.Linear(5, outputs), 0.1, **options).loss(torch.zeros(4, 5), y)


BAD = {
    "a class twice": (lambda: Hierarchy([[0, 1], [1, 2]]), "exactly once"),
    "a class left out": (lambda: Hierarchy([0, 2]), "exactly once"),
    "one class": (lambda: Hierarchy([0]), "at least two"),
    "an empty group": (lambda: Hierarchy([[0, 1], []]), "none empty"),
    "words": (lambda: Hierarchy(["cat", "dog"]), "class numbers"),
    "a class without samples": (lambda: Hierarchy.by_means(torch.zeros(4, 2), Y.clamp(max=2), 4), "no sample of class"),
    "m outputs": (lambda: loss(5, hierarchy="balanced", classes=5), r"one output per node, \(B, 4\)"),
    "another number of classes": (lambda: loss(hierarchy=Hierarchy.balanced(5), classes=6), "classes=6 does not match"),
    "balanced without classes": (lambda: loss(hierarchy="balanced"), "together with classes="),
    "no hierarchy": (lambda: loss(hierarchy=5), "nested groups or a Hierarchy; got 5"),
    "labels": (lambda: loss(y=Y + 1, hierarchy="balanced", classes=5), "got 5"),
    "perturbations": (
        lambda: PersistentExcitation(nn.Linear(5, 4), 0.1, hierarchy=[0, 1, 2, 3, 4]).perturbations(torch.zeros(4, 5)),
        "every node",
    ),
}  # fmt: skip


test_bad_input_is_refused_with_the_reason = refusing(BAD)
