"""Models whose forward pass uses torch.vmap or torch.func, and models that take one dict."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite import PersistentExcitation, margins, trace
from excite.errors import ModelError
from excite.lipschitz import bound
from excite.margin import SearchOptions


class Transformed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inside, self.weight, self.head = nn.Linear(5, 6), nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 1)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.inside(x)) @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "vmap":
            return self.head(torch.vmap(self.hidden)(x))
        if self.how == "jvp":
            return self.head(sum(torch.func.jvp(self.hidden, (x,), (torch.ones_like(x),))))
        if self.how == "grad":
            return self.head(torch.func.grad(lambda x: self.hidden(x).sum())(x) @ self.weight[:5])
        return self.head(torch.vmap(torch.func.jacrev(self.hidden))(x).sum(-1))


HOW = ["vmap", "jvp", "grad", "jacrev"]


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 5), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize("how", [HOW[0], *(pytest.param(how, marks=pytest.mark.slow) for how in HOW[1:])])
def test_parameters_inside_a_transform_are_named(how: str, data: tuple[Tensor, Tensor]) -> None:
    model, (x, y) = Transformed(how), data
    wiring = trace(model, x)
    assert wiring.layers[-1].name == "head"
    (note,) = wiring.notes
    assert "inside.weight, inside.bias (used inside torch.vmap or torch.func)" in note
    with pytest.warns(UserWarning, match=r"used inside torch\.vmap"):
        PersistentExcitation(model, 0.1).loss(x, y).backward()
    assert model.inside.weight.grad is not None
    assert len(margins(model, x, y, layers="all", options=SearchOptions(steps=2)).values) == 4
    with pytest.raises(ModelError, match=r"no Lipschitz bound"):
        bound(model, x)


def test_a_model_fully_inside_a_transform_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.layer)(x)

    with pytest.raises(ModelError, match=r"inside torch\.vmap or torch\.func"):
        trace(Whole(), torch.randn(3, 5))


def test_watch_of_a_model_with_a_transform(data: tuple[Tensor, Tensor], tmp_path) -> None:
    model, (x, y) = Transformed("vmap"), data
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with excite.watch(model, x, tmp_path / "run", optimizer, strict=True) as watch:
        for _ in range(2):
            loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert len(excite.load_run(tmp_path / "run").series("loss/step")[1]) == 2


class OneDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(torch.tanh(self.first(batch["x"])))


def test_a_model_may_take_one_dict(data: tuple[Tensor, Tensor], tmp_path) -> None:
    model, (x, y) = OneDict(), data
    assert [layer.name for layer in trace(model, {"x": x}).layers] == ["first", "last"]
    assert {group.law for group in trace(model, {"x": x}).groups} == {
        group.law for group in trace(nn.Sequential(model.first, nn.Tanh(), model.last), x).groups
    }
    pe = PersistentExcitation(model, 0.1)
    plain = PersistentExcitation(nn.Sequential(model.first, nn.Tanh(), model.last), 0.1)
    assert torch.equal(pe.loss({"x": x}, y), plain.loss(x, y))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with excite.watch(model, {"x": x}, tmp_path / "run", optimizer, strict=True) as watch:
        loss = F.binary_cross_entropy_with_logits(model({"x": x})[:, 0], y.float())
        loss.backward()
        optimizer.step()
        watch.step(loss)
    with pytest.raises(excite.ExciteError, match="got dict"):
        margins(model, {"x": x}, y)
