"""Theorem 2 as far as it holds, Lemmas 9 and 10 with sharp examples, and the counterexamples for ReLU networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import excite
from excite.bounds import reduced_alignment
from excite.errors import InputError
from excite.probes import alignment
from excite.train import gradient_flow
from models import CASES, build, same_state, state_of


class Free(nn.Module):
    """σ(U σ(Y x) + Z x): a residual block with a free skip."""

    def __init__(self, a: int, b: int, c: int, relu: bool) -> None:
        super().__init__()
        self.y, self.u, self.z = nn.Linear(a, b, False), nn.Linear(b, c, False), nn.Linear(a, c, False)
        self.act = nn.ReLU() if relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.u(self.act(self.y(x))) + self.z(x))


def network(kind: str, outputs: int = 1, relu: bool = False, seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    act: type[nn.Module] = nn.ReLU if relu else nn.Identity
    if kind == "fc":
        model = nn.Sequential(
            nn.Linear(4, 5, False), act(), nn.Linear(5, 3, False), act(), nn.Linear(3, outputs, False)
        )
    elif kind == "conv":
        model = nn.Sequential(nn.Conv1d(2, 3, 3, bias=False), act(), nn.Conv1d(3, 4, 2, bias=False), act(), nn.Flatten(),
                              nn.Linear(4 * 3, 3, False), act(), nn.Linear(3, outputs, False))  # fmt: skip
    else:
        model = nn.Sequential(
            nn.Linear(4, 3, False), act(), Free(3, 4, 3, relu), Free(3, 2, 5, relu), nn.Linear(5, outputs, False)
        )
    x = torch.randn(8, *((2, 6) if kind == "conv" else (4,)), dtype=torch.float64)
    torch.set_rng_state(state)
    return model.double(), x


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(["fc", "conv", "free"]), st.integers(1, 3), st.integers(0, 10**6), st.floats(-2, 2))
def test_it_holds_at_any_linear_weights(kind: str, outputs: int, seed: int, spread: float) -> None:
    """With the differences of the weights themselves the chain of inequalities needs no training."""
    model, x = CACHE.setdefault((kind, outputs), network(kind, outputs))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            size = math.exp(spread * (k % 3 - 1))
            p.copy_(size * torch.randn(p.shape, generator=g, dtype=torch.float64))
            if seed % 2:  # near rank one, where the bound is not trivial
                flat = p.flatten(1)
                u, s, v = torch.linalg.svd(flat, full_matrices=False)
                p.copy_((flat * 0.05 + s[0] * torch.outer(u[:, 0], v[0])).view_as(p))
    for name, bound in reduced_alignment(model, x).items():
        assert bound.holds == (not name.endswith(".y"))  # other paths lead past the inside of a block
        if bound.value is not None:
            assert bound.value <= bound.terms["measured"] + 1e-12


CACHE: dict[tuple[str, int], tuple[nn.Sequential, Tensor]] = {}


def test_factors_by_hand() -> None:
    model, x = network("conv")
    found = reduced_alignment(model, x)
    # Behind the last convolution: 4 channels at 3 places, min(4, 3). Behind the first also a 2-wide kernel on 3 channels.
    assert {k: b.terms["factor"] for k, b in found.items()} == {"5": 1, "2": 3, "0": 3 * 2}
    assert {k: b.terms["N_r"] for k, b in found.items()} == {"5": 0, "2": 0, "0": 0}
    model, x = network("free")
    found = reduced_alignment(model, x)
    assert {k: (b.terms["factor"], b.terms["N_r"]) for k, b in found.items() if b.holds} == {
        "0": (4, 2), "2.u+2.z": (2, 1), "3.u+3.z": (1, 0),
    }  # fmt: skip
    assert found["0"].terms["printed limit"] == max(1 / 3, 1 / 64)
    assert [a.text for a in found["2.y"].failed] == ["every path crosses the layer exactly once"]
    model, x = network("fc", outputs=3)
    assert reduced_alignment(model, x)["0"].terms["factor"] == 3


@pytest.mark.parametrize("kind", ["fc", "conv", "free"])
def test_it_holds_after_a_long_flow_from_small_weights(kind: str) -> None:
    model, x = network(kind, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    y = torch.sign(x.flatten(1)[:, 0] + 0.3)
    log_risk = lambda m: torch.logsumexp(-y * m(x)[:, 0], 0)  # noqa: E731  # the exponential loss: the same path
    course = gradient_flow(model, log_risk, 3.5, clock="length", at=1, rtol=1e-7, max_steps=150)
    found = reduced_alignment(course.model, x, model)
    for name, bound in found.items():
        if kind == "free" and name.endswith(".y"):
            continue
        assert bound.holds, str(bound)
        assert bound.value is not None
        assert bound.terms["1/rank"] <= bound.value <= bound.terms["measured"] + 1e-9
    last = found[list(found)[-1]]
    assert last.value > 0.8  # type: ignore[operator]
    assert alignment(course.model, x).junctions[-1].value > 0.97


def test_a_relu_network_has_no_such_bound_and_it_says_why() -> None:
    model, x = network("fc", relu=True)
    before = state_of(model)
    found = reduced_alignment(model, x)
    assert same_state(before, state_of(model))
    assert all(bound.value is None for bound in found.values())
    failed = found["2"].failed
    assert len(failed) == 1
    assert "off the diagonal" in failed[0].text
    assert "relu" in failed[0].detail
    assert found["0"].terms["limit"] == 1  # what the paper promises


def test_biases_and_identity_skips_are_named() -> None:
    model, x = build("deep-linear")
    found = reduced_alignment(model, x)
    assert [a.text for a in found["0"].failed] == ["no biases behind the layer"]
    assert found["1"].holds
    model, x = build("resnet-identity")
    assert all("identity skip" in b.failed[0].detail for b in reduced_alignment(model, x).values())


def test_initial_weights_have_to_fit_and_drift_is_seen() -> None:
    model, x = network("fc")
    other, _ = network("fc", seed=5)
    found = reduced_alignment(model, x, other)
    assert [a.text for a in found["0"].failed] == ["training kept the laws"]
    with pytest.raises(InputError, match="initial"):
        reduced_alignment(model, x, {"0.weight": torch.ones(1)})
    same = reduced_alignment(model, x, model.state_dict())
    assert same["0"].value == reduced_alignment(model, x)["0"].value


@pytest.mark.slow
# -- Lemmas 9 and 10 ---------------------------------------------------------------------------------------------
@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_lemma_9(a: int, b: int, c: int, seed: int) -> None:
    """‖T as c × ab‖₂² ≤ min(a, b) ‖T as bc × a‖₂²."""
    t = np.random.default_rng(seed).normal(size=(a, b, c))
    one = np.linalg.norm(t.transpose(2, 0, 1).reshape(c, a * b), 2)
    two = np.linalg.norm(t.transpose(1, 2, 0).reshape(b * c, a), 2)
    assert one**2 <= min(a, b) * two**2 * (1 + 1e-12)


def test_lemma_9_is_sharp() -> None:
    """One output channel whose kernel is the identity: squared norms 3 and 1."""
    t = np.eye(3)[:, :, None]
    assert np.linalg.norm(t.transpose(2, 0, 1).reshape(1, 9), 2) ** 2 == pytest.approx(3)
    assert np.linalg.norm(t.transpose(1, 2, 0).reshape(3, 3), 2) ** 2 == pytest.approx(1)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_lemma_10_with_2_instead_of_8(a: int, b: int, c: int, seed: int) -> None:
    """‖[U Z]‖₂² ≤ 2 ‖[Y; Z]‖₂² + λ_max(U'U − Y Y')₊, at any weights; D is not a squared norm."""
    rng = np.random.default_rng(seed)
    y, u, z = rng.normal(size=(b, a)), rng.normal(size=(c, b)), rng.normal(size=(c, a))
    left, right = np.hstack([u, z]), np.vstack([y, z])
    excess = max(0.0, np.linalg.eigvalsh(u.T @ u - y @ y.T)[-1])
    assert np.linalg.norm(left, 2) ** 2 <= 2 * np.linalg.norm(right, 2) ** 2 + excess + 1e-9


def test_lemma_10_is_sharp_with_2() -> None:
    """Y = (1 0), U = 1, Z = (0 1): U'U = Y Y', squared norms 2 and 1."""
    y, u, z = np.array([[1.0, 0.0]]), np.array([[1.0]]), np.array([[0.0, 1.0]])
    assert np.allclose(u.T @ u, y @ y.T)
    assert np.linalg.norm(np.hstack([u, z]), 2) ** 2 == pytest.approx(2)
    assert np.linalg.norm(np.vstack([y, z]), 2) ** 2 == pytest.approx(1)


def test_theorem_2_with_squared_norms_in_d_is_false() -> None:
    """Printed D_l = ‖W_{l+1}'W_{l+1} − W_l W_l'‖₂², squared. Scalars w₁ = 0, w₂ = ½ start with difference ¼: squared 1/16,
    but ‖w₂‖² − ‖w₁‖² = ¼ at the start already."""
    first, second = 0.0, 0.5
    printed = (second**2 - first**2) ** 2
    assert second**2 - first**2 > printed
    assert first**2 >= second**2 - abs(second**2 - first**2)


def test_layers_with_several_junctions_have_a_bound_for_each() -> None:
    model, x = build("heads")
    found = reduced_alignment(model, x)
    assert list(found) == ["query>key/head0", "query>key/head1", "value>out/head0", "value>out/head1", "out"]
    for head in range(2):
        matrix = model.value.weight.detach()[4 * head : 4 * head + 4]
        ratio = float(torch.linalg.matrix_norm(matrix, 2) ** 2 / matrix.square().sum())
        assert found[f"value>out/head{head}"].terms["measured"] == pytest.approx(ratio, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "papers"])
def test_every_group_of_every_model_has_an_entry(name: str) -> None:
    model, x = build(name)
    wiring = excite.trace(model, x, output=CASES[name].pick)
    assert len(reduced_alignment(model, x, wiring=wiring)) == sum(bool(group.producers) for group in wiring.groups)
