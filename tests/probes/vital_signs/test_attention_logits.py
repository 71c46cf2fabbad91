"""Attention by head, against a slow version on every kind of transformer."""

import math
import warnings

import pytest
import torch
from torch import nn

import excite
from excite.probes import AttentionLogits, Every, Loss
from excite.probes.base import StepContext
from excite.probes.vital_signs import attention_calls
from excite.probes.vital_signs.tokens import even_places
from transformer_zoo import FORMS, NAMES, FormsGPT, HandGPT, captured, make, queries_and_keys


def slow(zoo, example, rows=None, places=None):
    """Largest logit and mean entropy of every head, pair by pair.

    `rows` (sequences, tokens) says which tokens count, `places` which queries are looked at.
    """
    inputs, _, _ = captured(zoo.model, zoo.attention, example)
    modules = dict(zoo.model.named_modules())
    values = {}
    for path in zoo.attention:
        q, k = queries_and_keys(modules[path], inputs[path][:2])
        for head in range(q.shape[1]):
            largest, entropies = -math.inf, []
            for b in range(q.shape[0]):
                for i in range(q.shape[2]) if places is None else places:
                    if rows is not None and not rows[b, i]:
                        continue
                    keys = [j for j in range(k.shape[2]) if (not zoo.causal or j <= i) and (rows is None or rows[b, j])]
                    logits = [float(q[b, head, i] @ k[b, head, j]) / math.sqrt(q.shape[-1]) for j in keys]
                    largest = max(largest, *logits)
                    total = sum(map(math.exp, logits))
                    entropies.append(-sum(math.exp(one) / total * math.log(math.exp(one) / total) for one in logits))
            values[f"logit/{path}/head{head}"] = largest
            values[f"entropy/{path}/head{head}"] = sum(entropies) / len(entropies)
    values["logit"] = max(value for name, value in values.items() if name.startswith("logit/"))
    values["entropy"] = min(value for name, value in values.items() if name.startswith("entropy/"))
    return values


def measured(model, example):
    return {
        name: float(value) for name, value in AttentionLogits().measure(StepContext(model, 0, example=example)).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_those_of_a_slow_version(name):
    zoo = make(name)
    expected = slow(zoo, zoo.example)
    assert measured(zoo.model, zoo.example) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_left_padding_does_not_count(name):
    zoo = make(name)
    mask = torch.ones_like(zoo.example)
    mask[0, :3] = 0
    example = {"input_ids": zoo.example, "attention_mask": mask, "position_ids": torch.arange(7).expand(3, 7)}
    expected = slow(zoo, example, mask)
    assert measured(zoo.model, example) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("entries", [1 << 26, 100])
@pytest.mark.parametrize("name", ["llama", "softmax", "kernel", "bert"])
def test_some_queries_of_long_sequences_are_looked_at(name, entries, monkeypatch):
    monkeypatch.setattr(attention_calls, "_ENTRIES", entries)  # all at once, and in parts
    monkeypatch.setattr(attention_calls, "even_places", lambda count, device: even_places(count, 4))
    monkeypatch.setattr(attention_calls, "PLACES", 4)
    zoo = make(name)
    expected = slow(zoo, zoo.example, places=[0, 2, 4, 6])
    assert measured(zoo.model, zoo.example) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_packed_sequences_are_those_one_by_one():
    zoo = make("llama")
    lengths = (3, 4)
    first, second = zoo.example[:, :3], zoo.example[:, 3:]
    segment = torch.tensor([0] * 3 + [1] * 4)
    allowed = (segment[:, None] == segment) & torch.ones(7, 7, dtype=torch.bool).tril()
    mask = torch.zeros(7, 7).double().masked_fill(~allowed, torch.finfo(torch.float64).min)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(3, 7)
    example = {
        "input_ids": zoo.example, "attention_mask": mask.expand(3, 1, 7, 7), "position_ids": positions,
    }  # fmt: skip
    found = measured(zoo.model, example)
    alone = [measured(zoo.model, one) for one in (first, second)]
    for name in found:
        if name.startswith("logit"):
            assert found[name] == pytest.approx(max(one[name] for one in alone), rel=1e-10)
        elif name.startswith("entropy/"):
            mean = sum(n * one[name] for n, one in zip(lengths, alone)) / 7
            assert found[name] == pytest.approx(mean, rel=1e-10)


def test_nan_is_not_hidden():
    zoo = make("kernel")
    with torch.no_grad():
        zoo.model.blocks[1].attention.qkv.weight[0, 0] = math.nan
    found = measured(zoo.model, zoo.example)
    assert math.isnan(found["logit/blocks.1.attention/head0"])
    assert math.isfinite(found["logit/blocks.0.attention/head0"])


def test_eager_attention_of_transformers_is_seen():
    zoo = make("gpt2")
    expected = measured(zoo.model, zoo.example)
    zoo.model.set_attn_implementation("eager")
    assert measured(zoo.model, zoo.example) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_of_torch(need_weights):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0]

    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(2, 5, 8).double()
    found = measured(model, x)
    q, k, _ = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in
               nn.functional.linear(x, model.attention.in_proj_weight, model.attention.in_proj_bias).chunk(3, -1))  # fmt: skip
    logits = q @ k.transpose(-1, -2) / 2
    p = logits.softmax(-1)
    for head in range(2):
        assert found[f"logit/attention/head{head}"] == pytest.approx(float(logits[:, head].max()), rel=1e-10)
        expected = float(-(p * p.log()).sum(-1)[:, head].mean())
        assert found[f"entropy/attention/head{head}"] == pytest.approx(expected, rel=1e-10)


def test_bfloat16_is_measured_on_its_own_tensors():
    zoo = make("kernel")
    model = zoo.model.to(torch.bfloat16)
    found = measured(model, zoo.example)
    x = model.embed(zoo.example[:2])
    q, k, _ = (
        one.unflatten(-1, (2, 4)).transpose(1, 2)
        for one in model.blocks[0].attention.qkv(model.blocks[0].norm1(x)).chunk(3, -1)
    )
    logits = q.double() @ k.double().transpose(-1, -2) / 2
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()
    for head in range(2):
        expected = float(logits[:, head].masked_fill(~allowed, -math.inf).max())
        assert found[f"logit/blocks.0.attention/head{head}"] == pytest.approx(expected, rel=1e-6)


class HiddenAttention(nn.Module):
    """Its kernel belongs to another package: torch sees nothing of it."""

    def __init__(self, inner):
        super().__init__()
        self.qkv = inner.qkv

    def forward(self, x):
        return self.qkv(x)[..., :8].cumsum(1)


def test_a_kernel_that_cannot_be_seen_is_named_once(tmp_path):
    zoo = make("kernel")
    zoo.model.blocks[1].attention = HiddenAttention(zoo.model.blocks[1].attention)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with excite.watch(
            zoo.model, zoo.example, tmp_path / "run", probes=[Loss(), AttentionLogits(Every(1))]
        ) as watch:
            watch.step(0.5)
            watch.step(0.5)
    said = [str(one.message) for one in caught if "cannot be seen" in str(one.message)]
    assert len(said) == 1
    assert "blocks.1.attention" in said[0]
    names = set(excite.load_run(tmp_path / "run").frame().name)
    assert "attention/logit/blocks.0.attention/head0" in names
    assert not any("blocks.1" in one for one in names)


def test_no_attention_at_all_is_refused():
    with pytest.raises(excite.ModelError, match="no attention can be seen"):
        AttentionLogits().attach(StepContext(nn.Sequential(nn.Linear(4, 2)), 0, example=torch.randn(2, 4)))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "HeadsInFront"])
def test_every_form_of_attention(form):
    torch.manual_seed(0)
    model, ids = FormsGPT(form).double(), torch.randint(17, (3, 7))
    model(ids[:2])
    calls = [(len(calls), logits) for calls in (block["attention"].calls for block in model.blocks) for logits in calls]
    ctx, probe = StepContext(model, 0, example=ids), AttentionLogits()
    probe.attach(ctx)
    measured = {name: float(value) for name, value in probe.measure(ctx).items()}
    expected = {"logit": -math.inf, "entropy": math.inf}
    for number, (several, logits) in enumerate(calls):
        logits = logits.unflatten(0, (2, -1)) if logits.dim() == 3 else logits  # (sequences, heads, queries, keys)
        call = f"#{number % several + 1}" if number % several else ""
        for head in range(logits.shape[1]):
            p = logits[:, head].softmax(-1)
            entropy = float(torch.where(p > 0, -p * p.log(), 0.0).sum(-1).mean())
            name = f"blocks.{number // several}.attention{call}/head{head}"
            expected |= {f"logit/{name}": float(logits[:, head].max()), f"entropy/{name}": entropy}
            expected["logit"] = max(expected["logit"], expected[f"logit/{name}"])
            expected["entropy"] = min(expected["entropy"], entropy)
    assert measured == pytest.approx(expected, rel=1e-10)


def test_modules_of_one_head_are_measured():
    """Their class is not named after attention; that of the module around them is."""
    torch.manual_seed(0)
    model, ids = FormsGPT("MultiHead").double(), torch.randint(17, (3, 7))
    ctx, probe = StepContext(model, 0, example=ids), AttentionLogits()
    probe.attach(ctx)
    measured = probe.measure(ctx)
    heads = [f"logit/blocks.{i}.attention.heads.{k}/head0" for i in (0, 1) for k in (0, 1)]
    assert [name for name in measured if name.startswith("logit/")] == heads
    head, x = model.blocks[0]["attention"].heads[1], model.embed(ids[:2])
    scores = (head.q(x) @ head.k(x).mT / math.sqrt(8)).masked_fill(
        ~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf
    )
    assert float(measured[heads[1]]) == pytest.approx(float(scores.detach().max()), rel=1e-12)


def test_a_router_below_attention_is_none():
    class AttentionAndExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed = nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1))

        def forward(self, x):
            return self.mixed(x)

    with pytest.raises(excite.ModelError, match="no attention can be seen"):
        AttentionLogits().attach(StepContext(AttentionAndExperts(), 0, example=torch.randn(4, 7, 8)))


def test_heads_in_front_of_sequences_are_refused():
    """Taken for sequences in front, numbers of different heads would be mixed in silence."""
    model = FormsGPT("HeadsInFront")
    with pytest.raises(excite.ModelError, match=r"blocks\.0\.attention, blocks\.1\.attention .* heads in front"):
        AttentionLogits().attach(StepContext(model, 0, example=torch.randint(17, (3, 7))))


def test_a_cache_in_the_example_is_refused():
    from transformers import DynamicCache

    zoo = make("gpt2")
    example = {"input_ids": zoo.example, "past_key_values": DynamicCache()}
    with pytest.raises(excite.InputError, match="key-value cache"):
        AttentionLogits().attach(StepContext(zoo.model, 0, example=example))


def test_lengths_may_change_and_inference_mode_is_fine():
    model = HandGPT("kernel")
    for tokens in (3, 7):
        with torch.inference_mode():
            assert math.isfinite(measured(model, torch.randint(17, (4, tokens)))["logit"])


def test_findings_name_heads_that_grow_and_collapse():
    import numpy as np

    from excite.report.history import MetricHistory

    steps = np.arange(20)
    series = {
        "attention/logit/a/head0": (steps, np.linspace(1, 80, 20)),
        "attention/entropy/a/head0": (steps, np.linspace(2, 0.01, 20)),
    }
    grown, fallen = AttentionLogits.findings(MetricHistory(series, series.__getitem__))
    assert "a/head0 grew from 1" in grown.text
    assert "a/head0 has collapsed" in fallen.text
