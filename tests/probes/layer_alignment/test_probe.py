"""Ranks and alignment against a full singular value decomposition; the probe through watch, and across a restart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import excite
from excite.bounds import alignment as of_matrices
from excite.errors import InputError, ModelError
from excite.probes import Alignment, Every, alignment
from excite.probes.base import StepContext
from excite.wiring.junctions import junctions
from models import CASES, build, same_state, state_of
from probes.layer_alignment.references import svd


def by_hand(matrix: Tensor) -> dict[str, float]:
    u, s, v = svd(matrix)
    shares = s**2 / (s**2).sum()
    part = matrix.detach().double().numpy() / np.linalg.norm(matrix.detach().double().numpy())
    return {
        "ratio": float(shares[0]),
        "stable_rank": float((s**2).sum() / s[0] ** 2),
        "participation": float((s**2).sum() ** 2 / (s**4).sum()),
        "effective_rank": float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())),
        "distance": float(np.linalg.norm(part - np.outer(u[:, 0], v[0]))),
    }


NETWORKS = [
    "mlp",
    "deep-linear",
    "convolutional",
    "products",
    "transposed",
    "resnet-free",
    "resnet-norm",
    "shared",
    "grouped",
]


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_the_shared_table(name: str) -> None:
    model, x = build(name)
    before = state_of(model)
    found = alignment(model, x)
    assert same_state(before, state_of(model))
    parameters = dict(model.named_parameters())
    for one in found:
        weight = parameters.get(f"{one.layer}.weight", parameters.get(one.layer))
        assert weight is not None
        transposed = name == "transposed" and one.layer == "2"
        matrix = weight.transpose(0, 1).flatten(1) if transposed else weight.flatten(1)
        if name == "products" and one.layer == "first":
            matrix = weight.T
        assert one.shape == tuple(matrix.shape)
        for quantity, value in by_hand(matrix).items():
            assert float(getattr(one, quantity)) == pytest.approx(value, abs=1e-7)
        assert one.residual == 0
    assert str(found).count("\n") >= len(found.layers) + 1


def test_neighbours_are_those_of_the_wiring() -> None:
    model, x = build("deep-linear")
    found = alignment(model, x)
    extended = [torch.cat([m.weight, m.bias[:, None]], 1) for m in model]  # type: ignore[attr-defined]
    for k, one in enumerate(found.junctions):
        u, v = svd(extended[k])[0][:, 0], svd(model[k + 1].weight)[2][0]  # type: ignore[index]
        assert one.value == pytest.approx(abs(float(u @ v)), abs=1e-9)
    for layer in model:
        layer.bias.data.zero_()  # type: ignore[union-attr]
    found = alignment(model, x)
    expected = of_matrices([layer.weight.detach() for layer in model])  # type: ignore[union-attr]
    np.testing.assert_allclose([one.value for one in found.junctions], expected, atol=1e-7)
    assert found.between("0>1").law == "matrix"


def test_a_residual_block_is_u_and_z_and_norms_are_skipped() -> None:
    model, x = build("resnet-free")
    junction = alignment(model, x).between("block1.conv2+block1.skip>block2.conv1+block2.skip")
    block = model.block1
    both = torch.cat([p.flatten(1) if p.dim() > 1 else p[:, None] for p in
                      (block.conv2.weight, block.conv2.bias, block.skip.weight, block.skip.bias)], 1)  # fmt: skip
    assert junction.ratio == pytest.approx(by_hand(both)["ratio"], abs=1e-9)
    model, x = build("resnet-norm")
    found = {one.name: one for one in junctions(excite.trace(model, x))}
    assert found["block1.conv1>block1.conv2"].law == "norm"
    assert "stem+block1.conv2+block2.conv2>block1.conv1+block2.conv1+head" in found


@pytest.mark.slow
def test_every_model_of_the_table_can_be_looked_at() -> None:
    for name in CASES:
        if name != "papers":
            model, x = build(name)
            found = alignment(model, x, output=CASES[name].pick)
            assert all(0 <= one.ratio <= 1 for one in found)


@pytest.mark.parametrize("name", ["heads", "transformer"])
def test_every_head_has_its_own_alignment(name: str) -> None:
    """Of head k: rows of the values' weight, and bias if there is one, against columns of the output projection."""
    model, x = build(name)
    if name == "heads":
        made, read = model.value.weight, model.out.weight
        junction = "value>out/head{}"
    else:
        attention = model.encoder.layers[0].self_attn
        made = torch.cat([attention.in_proj_weight, attention.in_proj_bias[:, None]], 1)[16:]
        read, path = attention.out_proj.weight, "encoder.layers.0.self_attn"
        junction = path + ".in_proj_weight>" + path + ".out_proj/head{}"
    with torch.no_grad():
        read += 0.1 * torch.arange(64.0).view(8, 8).sin()
    found, values = alignment(model, x), []
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        u, v = svd(made[rows])[0][:, 0], svd(read[:, rows])[2][0]
        values.append(abs(float(u @ v)))
        assert found.between(junction.format(head)).value == pytest.approx(values[-1], abs=1e-9)
        assert found.between(junction.format(head)).ratio == pytest.approx(by_hand(made[rows])["ratio"], abs=1e-9)
    assert abs(values[0] - values[1]) > 0.01


def test_the_probe_writes_every_head(tmp_path) -> None:
    model, x = build("heads")
    run = tmp_path / "run"
    with excite.watch(model, example=x, run=run, probes=[Alignment(Every(1))]) as watch:
        watch.step()
    frame = excite.load_run(run).frame()
    found = alignment(model, x)
    assert len(found.junctions) == 5
    for one in found.junctions:
        written = frame.value[frame.name == f"alignment/aligned/{one.junction}"]
        assert written.tolist() == pytest.approx([one.value] * len(written), abs=1e-9)
        assert len(written)


def test_the_range_of_the_effective_rank_holds_the_truth() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50, bias=False), nn.ReLU(), nn.Linear(50, 1, bias=False)).double()
    x = torch.randn(2, 40, dtype=torch.float64)
    truth, found = alignment(model, x)["0"], alignment(model, x, exact=8, iterations=60)["0"]
    assert found.ratio == pytest.approx(truth.ratio, rel=1e-6)
    assert found.participation == pytest.approx(truth.participation, rel=1e-6)
    assert found.effective_rank.low <= float(truth.effective_rank) <= found.effective_rank.high
    assert found.effective_rank.high < 1.25 * float(truth.effective_rank)


def test_the_probe_through_watch_and_across_a_restart(tmp_path) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))

    def train(model: nn.Module, watch: excite.monitor.watch.Watch, steps: range) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in steps:
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = (model(x)[:, 0] - x[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)

    example = torch.randn(4, 12)
    whole, first = network(), network()
    with excite.watch(whole, example, tmp_path / "whole", probes=[Alignment(Every(5), exact=16)], strict=True) as watch:
        train(whole, watch, range(20))
    with excite.watch(first, example, tmp_path / "first", probes=[Alignment(Every(5), exact=16)], strict=True) as watch:
        train(first, watch, range(10))
        state = watch.state_dict()
        again = Alignment(Every(5), exact=16)
    with excite.watch(first, example, tmp_path / "second", probes=[again], strict=True) as watch:
        watch.load_state_dict(state)
        train(first, watch, range(10, 20))
    full = excite.load_run(tmp_path / "whole").frame()
    rest = excite.load_run(tmp_path / "second").frame()
    for name in ("alignment/ratio/0", "alignment/ratio/2", "alignment/aligned/0>2", "alignment/effective_rank_high/2"):
        a, b = (frame[frame.name == name].set_index("step").value for frame in (full, rest))
        assert list(a.index) == [0, 5, 10, 15, 20]
        assert a[15] == b[15]
        assert a[20] == b[20]
    last = by_hand(whole[2].weight)
    assert full[(full.name == "alignment/ratio/2") & (full.step == 20)].value.item() == pytest.approx(
        last["ratio"], rel=1e-3
    )


def test_autocast_does_not_reach_the_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 20)), torch.randn(4, 20)
    probe = Alignment(exact=4)
    ctx = StepContext(model, 0, example=x)
    probe.attach(ctx)
    expected = probe.measure(ctx)
    probe = Alignment(exact=4)
    probe.attach(ctx)
    with torch.autocast("cpu", torch.bfloat16):
        assert probe.measure(ctx) == pytest.approx(expected, rel=1e-6)


def test_bad_input() -> None:
    model, x = build("mlp")
    with pytest.raises(InputError, match="example"):
        Alignment().attach(StepContext(model, 0))
    with pytest.raises(InputError, match="attached"):
        Alignment().measure(StepContext(model, 0))
    with pytest.raises(InputError, match="exact"):
        Alignment(exact=0)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan  # type: ignore[index, union-attr, operator]
    with pytest.raises(ModelError, match="finite weights"):
        alignment(model, x)


def test_a_layer_of_zeros_has_ratio_zero() -> None:
    model, x = build("mlp")
    with torch.no_grad():
        model[2].weight.zero_()  # type: ignore[union-attr, operator]
    found = alignment(model, x)["2"]
    assert (found.ratio, float(found.effective_rank)) == (0.0, 0.0)
