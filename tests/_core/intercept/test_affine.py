"""Affine maps however they are written: recognised with their name and shapes, and excited like F.linear."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from excite import PersistentExcitation, margins, trace
from excite.bounds.relu_network import relu_network
from excite.errors import ModelError
from excite.margin import SearchOptions
from excite.probes.base import StepContext
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.sites import find
from excite.probes.layer_inputs import layer_inputs
from excite.report.audit.chains import linear_chain
from models import CASES, WAYS, build, build_way


def extremes(model: nn.Module, x: Tensor, **settings: object) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return torch.stack(PersistentExcitation(model, 0.3, steps=3, **settings).extremes(x))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_recognised_with_its_name_and_shapes(name: str) -> None:
    model, same, x = build_way(name)
    assert torch.allclose(model(x), same(x), rtol=1e-12, atol=1e-13)
    wiring, way = trace(model, x), WAYS[name]
    layer = wiring.layers[0]
    assert [layer.name for layer in wiring.layers] == [way.layer, "head"]
    assert (layer.kind, layer.in_shape) == ("conv" if "convolution" in name else "linear", way.in_shape)
    assert torch.Size(layer.out_shape).numel() == len(same.w)
    assert wiring.notes == ()
    assert set(wiring.parameters) == {path for path, _ in model.named_parameters()}
    assert {wiring.parameters[path] for path in way.shapes} == {f"weight of {way.layer}"}


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_excited_like_a_linear_layer(name: str, norm: str) -> None:
    model, same, x = build_way(name)
    assert torch.allclose(extremes(model, x, norm=norm), extremes(same, x, norm=norm), rtol=1e-10, atol=1e-11)


def spectral(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(layer)


def weight_norm(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(layer)


def orthogonal(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrizations.orthogonal(layer)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.T.T * self.scale


def own(layer: nn.Linear) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(layer, "weight", Scaled())


def turned(layer: nn.Linear) -> nn.Module:
    """A parametrization that returns a view of its parameter."""

    class Turned(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.T

        def right_inverse(self, weight: Tensor) -> Tensor:
            return weight.T.contiguous()

    return nn.utils.parametrize.register_parametrization(layer, "weight", Turned())


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.4)


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def old_weight_norm(layer: nn.Linear) -> nn.Module:
    return nn.utils.weight_norm(layer)


PARAMETRIZED = [spectral, weight_norm, orthogonal, own, turned, pruned, old_weight_norm, nn.utils.spectral_norm]


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
@pytest.mark.parametrize("change", PARAMETRIZED, ids=lambda change: change.__name__)
def test_parametrizations_keep_the_name_of_their_module(change) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(change(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 1)).double().eval()
    x = torch.randn(4, 5, dtype=torch.float64)
    model(x)
    wiring = trace(model, x)
    assert [layer.name for layer in wiring.layers] == ["0", "2"]
    assert wiring.notes == ()
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), model[2]).double()
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight)
        plain[0].bias.copy_(model[0].bias)
    assert torch.allclose(extremes(model, x), extremes(plain, x), rtol=1e-10, atol=1e-11)
    assert torch.allclose(extremes(model, x, layers=["0"]), extremes(plain, x, layers=["0"]), rtol=1e-10, atol=1e-11)
    product = Multiplied(model[0], model[2]).double()  # the same weight, without a layer that applies it
    assert [layer.name for layer in trace(product, x).layers] in (["layer", "head"], ["weight", "head"])
    assert torch.allclose(extremes(product, x), extremes(plain, x), rtol=1e-10, atol=1e-11)


class Multiplied(nn.Module):
    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, head
        if "weight" in vars(layer):  # kept as an attribute by a hook that runs before the layer's own forward
            self.layer.forward = lambda x: x @ layer.weight.T + layer.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) if "forward" in vars(self.layer) else x @ self.layer.weight.T + self.layer.bias
        return self.head(torch.relu(hidden))


class Everything(nn.Module):
    """One parameter of every role, and three of none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.position = nn.Parameter(torch.randn(2, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.scale = nn.Parameter(torch.rand(4))
        self.norm = nn.LayerNorm(4)
        self.slope = nn.PReLU()
        self.query = nn.Parameter(torch.randn(1, 1, 4))
        self.project = nn.Linear(4, 4)
        self.centres = nn.Parameter(torch.randn(5, 4))
        self.power = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.randn(3, 3))
        self.pair = nn.Bilinear(4, 4, 2, bias=False)
        self.head = nn.Linear(4 + 5 + 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x + self.position) * self.scale
        h = self.slope(torch.cat([self.token.expand(len(x), -1, -1), h], 1)) + self.table(torch.tensor([0, 1, 1]))
        h = h + self.project(self.query).expand_as(h)
        h = h.mean(1).abs() ** self.power
        return self.head(torch.cat([h, torch.cdist(h, self.centres), self.pair(h, h)], 1))


ROLES = {
    "table.weight": "bias",  # looked up at fixed places, it is added as a position is
    "position": "bias",
    "token": "learned signal",
    "scale": "scaling",
    "norm.weight": "normalization",
    "norm.bias": "normalization",
    "slope.weight": "slope of an activation",
    "query": "learned signal",
    "project.weight": "weight of project",
    "project.bias": "bias of project",
    "head.weight": "weight of head",
    "head.bias": "bias of head",
}
MISSING = ["centres", "power", "unused", "pair.weight"]


def test_every_parameter_has_a_role_or_is_named() -> None:
    model, x = Everything(), torch.randn(3, 2, 4)
    wiring = trace(model, x)
    assert dict(wiring.parameters) == ROLES
    (note,) = wiring.notes
    for name, reason in zip(MISSING, ("cdist", "pow", "not used with data", "bilinear")):
        assert name in note
        assert reason in note
    assert note.replace("\n", " ") in " ".join(str(wiring).split())
    assert sorted([*ROLES, *MISSING]) == sorted(path for path, _ in model.named_parameters())


def test_parameters_without_a_role_are_named_once_per_model() -> None:
    model, x = Everything(), torch.randn(3, 2, 4)
    pe = PersistentExcitation(model, 0.1)
    with pytest.warns(UserWarning, match="centres") as caught:
        pe.extremes(x)
    assert [one.filename for one in caught] == [__file__]  # the user's line
    (warning,) = [str(one.message) for one in caught]
    assert all(name in warning for name in MISSING)
    assert "scale" not in warning.replace("scaling", "")
    assert "\n" not in warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pe.extremes(x)
        PersistentExcitation(model, 0.2).extremes(x)
        with pytest.warns(UserWarning, match="centres"):  # another model
            PersistentExcitation(Everything(), 0.2).extremes(x)
        PersistentExcitation(Everything(), 0.2, layers="input").extremes(x)  # no layer is asked for


@pytest.mark.slow
def test_margins_of_all_layers_name_them_too() -> None:
    model, x = Everything(), torch.randn(3, 2, 4)
    with pytest.warns(UserWarning, match="centres") as caught:
        margins(model, x, (model(x) > 0.5).long().flatten(), layers="all", options=SearchOptions(steps=2))
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dict", "tuple")])
def test_the_models_of_the_table_are_accounted_for(name: str) -> None:
    model, x = build(name)
    wiring = trace(model, x)
    assert wiring.notes == ()
    assert set(wiring.parameters) == {path for path, _ in model.named_parameters()}


class Gated(nn.Module):
    """A weight that depends on the data is no constant: perturbations in front of it act through it."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written
        self.make, self.head = nn.Linear(4, 12), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tanh(self.make(x)).mean(0).reshape(3, 4)
        return self.head(F.linear(x, weight) if self.written == "linear" else x @ weight.T)


def test_a_weight_that_depends_on_the_data_is_searched_through() -> None:
    model = Gated("linear").double()
    product = Gated("product").double()
    product.load_state_dict(model.state_dict())
    x = torch.randn(1, 4, dtype=torch.float64)
    chosen = ["make", "head"]
    assert torch.allclose(extremes(model, x, layers=chosen), extremes(product, x, layers=chosen), rtol=1e-12)
    assert [layer.name for layer in trace(product, x).layers] == chosen


class Skip(nn.Module):
    """What addmm adds may be a signal."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.enter = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.enter(x))
        return self.head(torch.tanh(torch.addmm(skip, x, self.w) if self.fused else skip + x @ self.w))


def test_a_skip_connection_inside_addmm_is_searched_through() -> None:
    model, other, x = Skip(True).double(), Skip(False).double(), torch.randn(3, 4, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    assert torch.allclose(extremes(model, x), extremes(other, x), rtol=1e-12)


class Filled(nn.Module):
    """A constant that data is written into is a signal, and so are the views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros(len(x), 5, dtype=x.dtype)
        whole = memory[:]
        memory[:, :2].copy_(x[:, :2])
        memory[:, 2:] = x[:, 2:]
        return self.head(torch.tanh(whole @ self.w))


def test_memory_that_data_is_written_into_is_a_signal() -> None:
    model, x = Filled(), torch.randn(3, 5)
    assert [layer.name for layer in trace(model, x).layers] == ["w", "head"]


class Many(nn.Module):
    """Tensors come and go, so that their identities are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(50):
            x = x @ (self.w * 1.0)
            x = torch.tanh(x)
        return x.sum(1)


def test_identities_of_freed_tensors_do_not_confuse() -> None:
    wiring = trace(Many(), torch.randn(3, 4))
    assert [layer.name for layer in wiring.layers] == ["w", *(f"w#{i}" for i in range(2, 51))]


@pytest.mark.parametrize("name", WAYS)
def test_what_a_weight_multiplies_are_the_samples(name: str) -> None:
    model, _, x = build_way(name)
    first = StepContext(model, 0, example=x).signals[0]
    found = layer_inputs(first.call, first.input, first.call.run(first.input))
    assert torch.equal(found.rows, x)


@pytest.mark.parametrize("name", [name for name in WAYS if "bilinear" not in name])
def test_the_operator_of_a_site_is_the_matrix(name: str) -> None:
    model, same, x = build_way(name)
    operator = LayerOperator(find(model, x).first)
    assert operator.largest(1e-10)[0] == pytest.approx(
        float(torch.linalg.matrix_norm(same.w.detach(), ord=2)), rel=1e-9
    )
    given = operator.apply(x.reshape(len(x), *operator._zeros(operator.site.call.weight).shape[1:]))
    assert torch.allclose(given.reshape(len(x), -1), x @ same.w.T, rtol=1e-10, atol=1e-12)


def test_a_weight_repeated_per_sample_has_no_operator() -> None:
    model, _, x = build_way("bilinear with a learned input")
    with pytest.raises(ModelError, match="repeated for every sample"):
        find(model, x)


def test_a_padded_linear_layer_is_not_taken_for_a_plain_one() -> None:
    model = nn.Sequential(nn.ConstantPad1d((0, 1), 1.0), nn.Linear(5, 1))
    with pytest.raises(ModelError, match="layer 1 is not one"):
        linear_chain(model, torch.randn(3, 4))
    with pytest.raises(ModelError, match="1 is written as linear"):
        relu_network(model, torch.randn(3, 4))


class Caching(nn.Module):
    """A weight that is computed once, and kept for later passes."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 1)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.cache:
            self.cache.append(self.w * 2)
        return self.head(torch.tanh(x @ self.cache[0]))


def test_a_weight_kept_between_passes_stays_a_weight() -> None:
    model, x = Caching(), torch.randn(3, 5)
    PersistentExcitation(model, 0.1).loss(x, torch.tensor([0, 1, 0])).backward()
    assert model.w.grad is not None


STATES = {
    "torch.zeros": lambda m, x: torch.zeros(len(x), 4, dtype=x.dtype),
    "torch.zeros, expanded": lambda m, x: torch.zeros(1, 4, dtype=x.dtype).expand(len(x), -1),
    "a slice of torch.zeros": lambda m, x: torch.zeros(2, len(x), 4, dtype=x.dtype)[0],
    "torch.full": lambda m, x: torch.full((len(x), 4), 0.5, dtype=x.dtype),
    "zeros plus one": lambda m, x: torch.zeros(len(x), 4, dtype=x.dtype) + 1,
    "x.new_zeros": lambda m, x: x.new_zeros(len(x), 4),
    "W.new_zeros": lambda m, x: m.w.new_zeros(len(x), 4),
    "torch.zeros_like": lambda m, x: torch.zeros_like(x[:, :4]),
    "learned, expanded": lambda m, x: m.state.expand(len(x), -1),
    "learned, repeated": lambda m, x: m.state.repeat(len(x), 1),
    "learned, added to zeros": lambda m, x: torch.zeros(len(x), 4, dtype=x.dtype) + m.state,
}
PRODUCTS = {
    "F.linear": lambda h, w: F.linear(h, w),
    "@": lambda h, w: h @ w.T,
    "W @": lambda h, w: (w @ h.T).T,
    "einsum": lambda h, w: torch.einsum("bi,oi->bo", h, w),
    "addmm_": lambda h, w: torch.zeros(len(h), 4, dtype=h.dtype).addmm_(h, w.T),
}


class Stateful(nn.Module):
    """One step of a recurrent layer from an initial state, which comes about in one of many ways."""

    def __init__(self, state: str, product: str) -> None:
        super().__init__()
        self.make, self.product = STATES[state], PRODUCTS[product]
        self.enter, self.head = nn.Linear(5, 4), nn.Linear(4, 1)
        self.w = nn.Parameter(torch.randn(4, 4))
        if state.startswith("learned"):
            self.state = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(x) + self.product(self.make(self, x), self.w)))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("state", STATES)
def test_an_initial_state_is_an_input_however_it_is_made(state: str, product: str) -> None:
    torch.manual_seed(0)
    model, x = Stateful(state, product).double(), torch.randn(3, 5, dtype=torch.float64)
    wiring = trace(model, x)
    assert [(layer.name, layer.in_shape) for layer in wiring.layers] == [("enter", (5,)), ("w", (4,)), ("head", (4,))]
    assert wiring.notes == ()
    other = Stateful(state, "F.linear").double()
    other.load_state_dict(model.state_dict())
    assert torch.allclose(extremes(model, x), extremes(other, x), rtol=1e-10, atol=1e-11)


CONSTANTS = {
    "eye @ W": lambda m, x: x @ (torch.eye(5, dtype=x.dtype) @ m.w),
    "triu @ W": lambda m, x: x @ (torch.ones(5, 5, dtype=x.dtype).triu() @ m.w),
    "mask @ W": lambda m, x: x @ ((torch.arange(25).reshape(5, 5) % 3 > 0).to(x) @ m.w),
    "new_zeros, written to": lambda m, x: x @ _written(x.new_zeros(5, 4), m.w),
    "new_zeros, written to, @ W": lambda m, x: x @ (_written(x.new_zeros(5, 5), torch.eye(5).to(x)) @ m.w),
    "zeros + W": lambda m, x: x @ (torch.zeros(5, 4, dtype=x.dtype) + m.w),
}


def _written(memory: Tensor, values: Tensor) -> Tensor:
    memory[:] = values
    return memory


class Multiplying(nn.Module):
    def __init__(self, apply) -> None:
        super().__init__()
        self.apply_to = apply
        self.w, self.make, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 20), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.apply_to(self, x)))


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_times_a_weight_is_a_weight(name: str) -> None:
    wiring = trace(Multiplying(CONSTANTS[name]), torch.randn(3, 5))
    assert [(layer.name, layer.in_shape) for layer in wiring.layers] == [("w", (5,)), ("head", (4,))]


def test_a_weight_normalized_by_a_product_with_ones_stays_one() -> None:
    wiring = trace(Multiplying(lambda m, x: x @ (m.w / (torch.ones(1, 5) @ m.w.abs()))), torch.randn(3, 5))
    assert [(layer.name, layer.in_shape) for layer in wiring.layers] == [("w", (1, 5)), ("w#2", (5,)), ("head", (4,))]


IN_PART_DATA = {
    "W + d(x)": lambda m, x: m.w + m.make(x).mean(0).reshape(5, 4),
    "d(x) - W": lambda m, x: m.make(x).mean(0).reshape(5, 4) - m.w,
    "d(x), W added in place": lambda m, x: m.make(x).mean(0).reshape(5, 4).add_(m.w),
    "W · d(x)": lambda m, x: m.w * m.make(x).mean(0).reshape(5, 4),
    "(W · number of x) + d(x)": lambda m, x: (m.w * x.mean()) + m.make(x).mean(),
    "half of W + d(x)": lambda m, x: 0.5 * (m.w.T + m.make(x).mean(0).reshape(4, 5)).T,
}


@pytest.mark.parametrize("name", IN_PART_DATA)
def test_a_weight_that_is_partly_data_is_found_by_its_parameter(name: str) -> None:
    make = IN_PART_DATA[name]
    torch.manual_seed(0)
    model = Multiplying(lambda m, x: x @ make(m, x)).double()
    same = Multiplying(lambda m, x: F.linear(x, make(m, x).T)).double()
    same.load_state_dict(model.state_dict())
    x = torch.randn(3, 5, dtype=torch.float64)
    for one in (model, same):
        wiring = trace(one, x)
        assert [layer.name for layer in wiring.layers] == ["make", "w", "head"]
        assert wiring.parameters["w"] == "weight of w"
    assert torch.allclose(extremes(model, x), extremes(same, x), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mix", [torch.add, torch.mul], ids=["added", "multiplied"])
def test_a_weight_for_every_sample_that_is_in_part_data_is_named(mix) -> None:
    model = Multiplying(lambda m, x: torch.bmm(x[:, None], mix(m.w, m.make(x).reshape(-1, 5, 4)))[:, 0])
    wiring = trace(model, torch.randn(3, 5))
    assert [layer.name for layer in wiring.layers] == ["make", "head"]
    (note,) = wiring.notes
    assert "w (part of a matrix of each sample's own" in note
    with pytest.warns(UserWarning, match="each sample's own"):
        PersistentExcitation(model, 0.1).extremes(torch.randn(3, 5))


class Scores(nn.Module):
    """Attention by hand: a bias that is added to a signal is no weight of what the sum is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias, self.relative = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 3))
        self.per_head = nn.Parameter(torch.randn(2, 2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = x @ self.query + self.bias, x @ self.key
        heads = q.unflatten(-1, (2, 2)) + self.per_head  # as in Transformer-XL
        scores = torch.einsum("bind,bjnd->bij", heads, k.unflatten(-1, (2, 2)))
        scores = scores + torch.einsum("bind,bjnd->bnij", heads, k.unflatten(-1, (2, 2))).mean(1)
        return self.head((torch.softmax(scores + self.relative, -1) @ x).mean(1))


def test_biases_inside_attention_stay_biases() -> None:
    wiring = trace(Scores(), torch.randn(2, 3, 4))
    assert [layer.name for layer in wiring.layers] == ["query", "key", "head"]
    assert {wiring.parameters[name] for name in ("bias", "relative", "per_head")} == {"bias"}
    assert wiring.notes == ()


EXPANDED = {
    "mul": lambda m, x: (x[:, None].expand(-1, 4, -1).clone() * m.w.T).sum(-1),
    "mul_": lambda m, x: x[:, None].expand(-1, 4, -1).clone().mul_(m.w.T).sum(-1),
    "div": lambda m, x: (x[:, None].expand(-1, 4, -1).clone() / m.w.T.reciprocal()).sum(-1),
    "div_": lambda m, x: x[:, None].expand(-1, 4, -1).clone().div_(m.w.T.reciprocal()).sum(-1),
}


def test_products_in_place_and_divisions_are_like_products() -> None:
    x, first, state = torch.randn(3, 5, dtype=torch.float64), None, Multiplying(None).double().state_dict()
    for apply in EXPANDED.values():
        model = Multiplying(apply).double()
        model.load_state_dict(state)
        assert [(one.name, one.in_shape) for one in trace(model, x).layers] == [("w", (4, 5)), ("head", (4,))]
        del model.make  # used by none of them
        found = extremes(model, x)
        first = found if first is None else first
        assert torch.allclose(found, first, rtol=1e-10, atol=1e-11)


class Into(nn.Module):
    """A frozen layer that writes into memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(5, 4), requires_grad=False), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.mm(x, self.w, out=x.new_empty(0))))


def test_a_product_with_out_is_recognised() -> None:
    model, x = Into(), torch.randn(3, 5)
    before = model(x)
    assert [layer.name for layer in trace(model, x).layers] == ["w", "head"]
    assert torch.equal(before, StepContext(model, 0, example=x).output)


@pytest.mark.parametrize("name", ["addmm_", "x.mul_(v).sum", "x *= v, sum", "x.div_(v).sum", "(x / v).sum"])
@pytest.mark.parametrize("low", ["autocast", "input"])
def test_in_place_calls_keep_low_precision_outputs(name: str, low: str) -> None:
    model, _, x = build_way(name)
    model, x = model.float(), x.float()
    if low == "input" and name != "addmm_":
        model.head, x = model.head.bfloat16(), x.bfloat16()
        if name == "(x / v).sum":
            model.head = model.head.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=low == "autocast"):
        assert torch.equal(model(x), StepContext(model, 0, example=x).output)


class Odd(nn.Module):
    """Products that are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self.low_level = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.ops.aten.mm(torch.tanh(x), self.low_level))


def test_products_that_are_not_followed_are_named() -> None:
    (note,) = trace(Odd(), torch.randn(3, 4)).notes
    assert "low_level (used by mm)" in note


class RelativePositions(nn.Module):
    """Attention with a learned bias for every distance, as in T5: it reaches the kernel as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(9, 2), nn.Linear(8, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        distance = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
        bias = self.table(distance).permute(2, 0, 1)[None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2).mean(1))


def test_a_learned_mask_of_attention_is_a_bias() -> None:
    wiring = trace(RelativePositions(), torch.randn(3, 5, 8))
    assert not wiring.notes
    assert wiring.parameters["table.weight"] == "bias"
