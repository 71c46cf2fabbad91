"""What the training-invariances paper says about conserved quantities, statement by statement, in float64.

With S(a, b) = Σ a·b over producers minus Σ a·b over consumers, gradient flow conserves a law exactly if S(w, ∇L) = 0, so a
law is refuted by one point in weight space, and a claim by one that a pencil can follow.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from excite.probes import conservation
from excite.wiring import trace
from probes.conserved.two_layers import rates, tensor


def test_lemma_3_second_part_fails_for_relu_with_two_units() -> None:
    """f(x) = a₁ relu(w₁x) + a₂ relu(w₂x) at x = 1 with w = (1, −1), a = (1, 1), y = 0, half the squared error: four weights,
    none of them zero. Unit 1 is active, unit 2 is not; f = 1, so ∂w₁ = 1, ∂a₁ = 1 and unit 2 gets no gradient. Then
    d/dt(w₁w₂) = −1·w₂ = 1 while d/dt(a₁a₂) = −1·a₂ = −1: the difference that the lemma conserves grows at the rate 2.
    The proof gives the jagged paths, into unit 1 and out of unit 2, one common derivative (equations 40 to 43); those
    into an inactive unit have none."""
    w1, w2 = tensor([1.0], [-1.0]), tensor([1.0, 1.0])
    x = torch.ones(1, dtype=torch.float64)
    (0.5 * (w2 @ F.relu(w1 @ x)).square().sum()).backward()
    assert rates(w1, w2).tolist() == [[0.0, 2.0], [2.0, 0.0]]


def test_lemma_3_first_part_holds_for_relu_and_leaky_relu() -> None:
    generator = torch.Generator().manual_seed(0)
    for slope in (0.0, 0.3):
        w1, w2 = (
            torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (2, 5))
        )
        x = torch.randn(3, 7, generator=generator, dtype=torch.float64)
        (w2 @ F.leaky_relu(w1 @ x, slope)).exp().sum().backward()
        found = rates(w1, w2)
        assert float(found.diagonal().abs().max()) < 1e-12 * float(found.abs().max())


def test_off_the_diagonal_by_coincidence() -> None:
    """Slopes differ at the only point, but a₁z₂ = a₂z₁: w = (1, −1), a = (1, −1), x = 1. The entry stands still; with a₂ = −2 it
    does not. So equal slopes are not necessary, only generically so."""
    for second, rate in ((-1.0, 0.0), (-2.0, -1.0)):
        w1, w2 = tensor([1.0], [-1.0]), tensor([1.0, second])
        (0.5 * (w2 @ F.relu(w1 @ torch.ones(1, dtype=torch.float64))).square().sum()).backward()
        assert rates(w1, w2)[0, 1].item() == rate


def test_lemma_8_with_absolute_values_fails_if_linear() -> None:
    """One number x = 1, two channels with kernels of size one: f = a₁w₁ + a₂w₂, w = (1, 2), a = (1, −1), and the loss f.
    ∂w = a and ∂a = w, so d/dt(w₁w₂) = −(1·2 + 1·(−1)) = −1 and d/dt(a₁a₂) = −(1·(−1) + 1·2) = −1: the signed law holds.
    But a₁a₂ < 0, so d/dt|a₁a₂| = 1 ≠ d/dt|w₁w₂| = −1."""
    w, a = tensor(1.0, 2.0), tensor(1.0, -1.0)
    (a @ w).backward()
    with torch.no_grad():
        dw, da = -w.grad, -a.grad  # type: ignore[operator]
        made, read = dw[0] * w[1] + w[0] * dw[1], da[0] * a[1] + a[0] * da[1]
        assert (float(made), float(read)) == (-1.0, -1.0)
        assert float(w.prod().sign() * made) == -1.0
        assert float(a.prod().sign() * read) == 1.0


def test_the_signed_law_holds_for_linear_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(18, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    with conservation(model, optimizer, x, off_diagonal=True) as ledger:
        for _ in range(50):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        for entry in ledger.read().entries:
            assert entry.off_diagonal is not None
            assert entry.off_diagonal.exact
            assert float(entry.off_diagonal.drift.abs().max()) > 1e-8
            assert entry.off_diagonal.relative < 1e-14


def test_the_loss_of_y_times_f_x_is_not_that_of_f_of_y_times_x() -> None:
    """ℓ(y ν(x)) = ℓ(ν(y x)), used in section 2, fails for ν(x) = relu(x), x = 1, y = −1: −1 against 0."""
    relu = torch.nn.functional.relu
    x = torch.ones(())
    assert (float(-relu(x)), float(relu(-x))) == (-1.0, 0.0)


def blocks(kind: str) -> tuple[nn.Module, Tensor]:
    """Two layers around a free residual block r(x) = σ(U σ(Y x) + Z x), or a convolution in front of one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(2, 3, 3, bias=False) if kind == "conv" else nn.Linear(4, 5, bias=False)
            size = 12 if kind == "conv" else 5
            self.Y, self.U = nn.Linear(size, 3, bias=False), nn.Linear(3, 4, bias=False)
            self.Z, self.last = nn.Linear(size, 4, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x)).flatten(1)
            return self.last(F.relu(self.U(F.relu(self.Y(x))) + self.Z(x)))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Net().double(), torch.randn(5, *((2, 6) if kind == "conv" else (4,)), dtype=torch.float64)


def flow(sites: list[Tensor]) -> Tensor:
    return torch.stack([(rows * grads).sum(1) for rows, grads in zip(sites[::2], sites[1::2])]).sum(0)


def test_theorem_1_case_6_fails_as_printed_and_holds_with_y_z() -> None:
    """A convolution in front of a free residual block is read by [Y; Z]; [U Z] does not even have its columns."""
    model, x = blocks("conv")
    (model(x) - 1).square().sum().backward()
    p = dict(model.named_parameters())

    def by_channel(name: str) -> list[Tensor]:
        """(channels, rest): 12 inputs are 3 channels times 4 positions."""
        return [t.detach().T.reshape(3, -1) for t in (p[name], p[name].grad)]  # type: ignore[union-attr, list-item]

    made = flow([t.detach().flatten(1) for t in (p["first.weight"], p["first.weight"].grad)])  # type: ignore[union-attr, list-item]
    corrected = flow(by_channel("Y.weight")) + flow(by_channel("Z.weight"))
    printed = flow(by_channel("Z.weight"))  # what of [U Z] is read by the convolution at all
    torch.testing.assert_close(made, corrected, rtol=1e-10, atol=1e-12)
    assert float((made - printed).abs().max()) > 1e-3
    (group,) = [g for g in trace(model, x).groups if g.producers[0].layer == "first"]
    assert [site.layer for site in group.consumers] == ["Y", "Z"]
    # Case 5: the fully connected layer behind a convolution is (d·l) × c, 4 positions for each of its outputs.
    assert group.consumers[0].rows(p["Y.weight"]).shape == (3, 3 * 4)


def test_theorem_1_case_7_holds_on_the_diagonal() -> None:
    model, x = blocks("dense")
    pairs = {(g.producers[0].layer, tuple(s.layer for s in g.consumers)): g.law for g in trace(model, x).groups}
    assert pairs == {("first", ("Y", "Z")): "channel", ("Y", ("U",)): "channel", ("U", ("last",)): "channel"}


def test_appendix_f_equation_82_has_the_factor_one() -> None:
    """w_av(t+1)w_au(t+1) − w_av w_au − η² d_av d_au = −η (w_av d_au + w_au d_av): factor 1, not 2."""
    w, d, rate = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -1.0]), 0.1
    after = w - rate * d
    left = after.prod() - w.prod() - rate**2 * d.prod()
    torch.testing.assert_close(left, -rate * (w[0] * d[1] + w[1] * d[0]))


def test_appendix_f_the_slack_is_bounded_by_the_initial_risk() -> None:
    """Equations 86 to 90, with η ≤ min(1, 1/β): Σ η² g² ≤ 2 (R(0) − R(T)). On a deep linear network, small steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    first = (model(x) - y).square().mean().item()
    with conservation(model, optimizer, x) as ledger:
        for _ in range(300):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        entry = ledger.read()["0"]
    assert 0 < float(entry.terms["step"].abs().max()) <= 2 * first


def test_attention_conserves_queries_keys_and_values_outputs() -> None:
    """[W_Q b_Q][W_Q b_Q]' − [W_K b_K][W_K b_K]' and [W_V b_V][W_V b_V]' − W_O'W_O, whole matrices within a head; entries
    between heads are not conserved."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = attention, nn.Linear(6, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]

    model, x = Net(), torch.randn(3, 4, 6, dtype=torch.float64)
    nn.init.normal_(attention.in_proj_bias)
    (model(x) - 1).square().sum().backward()
    w = torch.cat([attention.in_proj_weight, attention.in_proj_bias[:, None]], 1).detach()
    g = torch.cat([attention.in_proj_weight.grad, attention.in_proj_bias.grad[:, None]], 1)  # type: ignore[list-item, index]
    out = attention.out_proj.weight
    (wq, wk, wv), (gq, gk, gv) = w.chunk(3), g.chunk(3)
    scale = float((wq @ gq.T).abs().max())
    for head, other in itertools.product(range(2), repeat=2):
        a, b = slice(3 * head, 3 * head + 3), slice(3 * other, 3 * other + 3)
        keys = wq[a] @ gq[b].T + gq[a] @ wq[b].T - wk[a] @ gk[b].T - gk[a] @ wk[b].T
        o, go = out.detach().T, out.grad.T  # type: ignore[union-attr]
        values = wv[a] @ gv[b].T + gv[a] @ wv[b].T - o[a] @ go[b].T - go[a] @ o[b].T
        for found in (keys, values):
            assert (float(found.abs().max()) < 1e-12 * max(scale, 1)) == (head == other)


def test_a_normalizations_own_pair_is_a_producer() -> None:
    """γ² + β² minus what reads the channel is conserved; ⟨w, ∇w⟩ = 0 in front of it for eps = 0: per channel for batch
    normalization, for the whole layer only for layer normalization."""
    for norm in (nn.BatchNorm1d(4, eps=1e-14), nn.LayerNorm(4, eps=1e-14)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 1)).double()
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        (model(torch.randn(6, 3, dtype=torch.float64)) - 1).square().sum().backward()
        first, last = model[0], model[3]

        def dot(p: Tensor) -> Tensor:
            return p.detach() * p.grad  # type: ignore[operator]

        made = dot(norm.weight) + dot(norm.bias)
        torch.testing.assert_close(made, dot(last.weight).sum(0))  # type: ignore[arg-type]
        per_channel = dot(first.weight).sum(1) + dot(first.bias)  # type: ignore[arg-type]
        size = float(dot(first.weight).abs().sum())  # type: ignore[arg-type]
        assert abs(float(per_channel.sum())) < 1e-9 * size
        assert (float(per_channel.abs().max()) < 1e-9 * size) == isinstance(norm, nn.BatchNorm1d)


def test_the_activation_of_a_transformers_mlp_decides_its_law() -> None:
    for activation, law in (("relu", "channel"), ("gelu", "none")):
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True, dropout=0.0)
        groups = trace(nn.Sequential(layer, nn.Linear(8, 1)), torch.randn(2, 3, 8)).groups
        (group,) = [g for g in groups if g.producers[0].layer == "0.linear1"]
        assert group.law == law
        if law == "none":
            assert group.why == "gelu between 0.linear1 and 0.linear2 is not positively homogeneous"
