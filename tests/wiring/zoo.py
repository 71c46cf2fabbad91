"""Models beyond the shared table: every rule of the channel tracer at least once, and things that must break a law."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A module from parts and a forward function, to keep the zoo short."""

    def __init__(self, forward: Callable[[Net, Tensor], object], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self._function = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> object:
        return self._function(self, x)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2 + 0.1)


def two(between: Callable[[Tensor], Tensor], width: int = 6) -> Callable[[], nn.Module]:
    """fc1, something, fc2."""
    return lambda: Net(lambda m, x: m.fc2(between(m.fc1(x))), fc1=nn.Linear(5, width), fc2=nn.Linear(width, 2))


def _inplace(m: Net, x: Tensor) -> Tensor:
    h = m.fc1(x)
    F.relu(h, inplace=True)
    z = m.fc2(h)
    z += h
    z *= 2
    return m.fc3(z)


def _inplace_view(m: Net, x: Tensor) -> Tensor:
    h = m.fc1(x)
    v = h.view(-1, 3, 2)
    torch.tanh_(v)
    return m.fc2(h)


def _swiglu(m: Net, x: Tensor) -> Tensor:
    return m.down(F.silu(m.gate(x)) * m.up(x))


def _gated(
    gate: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda h: h
) -> Callable[[], nn.Module]:
    """down(after(gate(g(x)) * up(x)))."""
    return lambda: Net(
        lambda m, x: m.down(after(gate(m.gate(x)) * m.up(x))),  # type: ignore[operator]
        gate=nn.Linear(5, 6), up=nn.Linear(5, 6), down=nn.Linear(6, 2),
    )  # fmt: skip


def _shared_gate(m: Net, x: Tensor) -> Tensor:
    gate = F.relu(m.gate(x))
    return m.down(gate * m.up(x)) + m.side(gate * m.up2(x))


def _residual_product(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.stem(x))
    return m.down(h + m.a(h) * m.b(h))


def _heads(m: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, t, _ = x.shape
    return tuple(f(x).view(b, t, 2, 3).transpose(1, 2) for f in (m.q, m.k, m.v))  # type: ignore[return-value]


def _explicit_attention(m: Net, x: Tensor) -> Tensor:
    q, k, v = _heads(m, x)
    weights = ((q @ k.transpose(-1, -2)) / 3**0.5).softmax(-1)
    return m.o((weights @ v).transpose(1, 2).flatten(2))


def _fused_attention(m: Net, x: Tensor) -> Tensor:
    q, k, v = _heads(m, x)
    return m.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _grouped_attention(m: Net, x: Tensor) -> Tensor:
    """Four query heads of two channels, two key heads, by enable_gqa."""
    q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (m.q, m.k, m.v))
    return m.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


def _einsum_attention(m: Net, x: Tensor) -> Tensor:
    q, k, v = (f(x).unflatten(-1, (2, 3)) for f in (m.q, m.k, m.v))
    mask = torch.full((4, 4), -1e9, dtype=x.dtype).triu(1)
    weights = (torch.einsum("bthd,bshd->bhts", q, k) + mask).softmax(-1)
    return m.o(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


def _linear_attention(m: Net, x: Tensor) -> Tensor:
    q, k, v = _heads(m, x)
    return m.o(((q @ k.mT) @ v).transpose(1, 2).flatten(2))


def _written(norm: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A residual block whose normalization is written out, with a weight of its own."""
    return lambda: Net(
        lambda m, x: m.head(m.w2 * norm(m.a(x) + m.b(F.relu(m.w * norm(m.a(x)))))),
        a=nn.Linear(5, 6), b=nn.Linear(6, 6), w=P(6), w2=P(6), head=nn.Linear(6, 2),
    )  # fmt: skip


def _layer_norm(h: Tensor) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-13)


def _vit(m: Net, x: Tensor) -> Tensor:
    h = m.patch(x).flatten(2).transpose(1, 2)
    h = torch.cat([m.cls.expand(len(x), -1, -1), h], 1) + m.pos
    h = h + m.fc2(F.relu(m.fc1(m.norm1(h))))
    return m.head(m.norm2(h)[:, 0])


def _shuffle(m: Net, x: Tensor) -> Tensor:
    h = F.channel_shuffle(F.relu(m.conv1(x)), 2)
    return m.fc(F.relu(m.conv2(h)).mean((2, 3)))


def _mixing_reshape(m: Net, x: Tensor) -> Tensor:
    h = F.relu(m.conv(x))  # (B, 4, 6, 6)
    return m.fc(h.permute(0, 2, 3, 1).reshape(len(x), 48, 3).sum(1))


def _attention_parts() -> dict[str, nn.Module]:
    return {"q": nn.Linear(5, 6), "k": nn.Linear(5, 6), "v": nn.Linear(5, 6), "o": nn.Linear(6, 2)}


VEC, SEQ, IMG = (5,), (4, 5), (2, 6, 6)
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sigmoid": (two(torch.sigmoid), VEC),
    "gelu": (two(F.gelu), VEC),
    "silu": (two(F.silu), VEC),
    "softplus": (two(F.softplus), VEC),
    "elu": (two(F.elu), VEC),
    "softmax": (two(lambda h: h.softmax(-1)), VEC),
    "exp": (two(torch.exp), VEC),
    "pow": (two(lambda h: h**2), VEC),
    "square-by-product": (two(lambda h: h * h), VEC),
    "added-constant": (two(lambda h: F.relu(h + 1)), VEC),
    "detached": (two(lambda h: F.relu(h) + h.detach()), VEC),
    "clamp": (two(lambda h: h.clamp(-1, 1)), VEC),
    "sort": (two(lambda h: h.sort(-1).values), VEC),
    "no-grad": (two(lambda h: h + _no_grad(h)), VEC),
    "relu-by-clamp": (two(lambda h: h.clamp(min=0)), VEC),
    "relu-by-where": (two(lambda h: torch.where(h > 0, h, 0.1 * h)), VEC),
    "relu-by-product": (two(lambda h: h * (h > 0)), VEC),
    "maximum": (two(lambda h: torch.maximum(h, -2 * h)), VEC),
    "maxout": (two(lambda h: h.view(-1, 3, 2).amax(-1).repeat_interleave(2, -1)), VEC),
    "negated": (two(lambda h: -h / 3), VEC),
    "chunks": (two(lambda h: torch.cat([F.relu(h.chunk(2, -1)[0]), h.chunk(2, -1)[1]], -1)), VEC),
    "half-tanh": (two(lambda h: torch.cat([F.relu(h[:, :2]), torch.tanh(h[:, 2:])], -1)), VEC),
    "indexed": (two(lambda h: F.relu(h)[:, [5, 4, 3, 2, 1, 0]]), VEC),
    "padded": (two(lambda h: F.pad(F.relu(h[:, 1:]), (1, 0))), VEC),
    "masked": (two(lambda h: F.relu(h).masked_fill(torch.arange(6) > 3, 0.0)), VEC),
    "inplace": (lambda: Net(_inplace, fc1=nn.Linear(5, 6), fc2=nn.Linear(6, 6), fc3=nn.Linear(6, 2)), VEC),
    "inplace-view": (lambda: Net(_inplace_view, fc1=nn.Linear(5, 6), fc2=nn.Linear(6, 2)), VEC),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 2)), VEC),
    "swiglu": (lambda: Net(_swiglu, gate=nn.Linear(5, 6), up=nn.Linear(5, 6), down=nn.Linear(6, 2)), VEC),
    "bilinear": (lambda: Net(lambda m, x: m.c(m.a(x) * m.b(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(6, 2)), VEC),
    "reglu": (_gated(F.relu), VEC),
    "geglu": (_gated(F.gelu), VEC),
    "bilinear-relu-after": (_gated(lambda g: g, F.relu), VEC),
    "product-tanh": (_gated(F.relu, torch.tanh), VEC),
    "product-output": (lambda: Net(lambda m, x: F.relu(m.a(x)) * m.b(x), a=nn.Linear(5, 6), b=nn.Linear(5, 6)), VEC),
    "product-norm": (lambda: Net(lambda m, x: m.c(m.n(F.relu(m.a(x)) * m.b(x))), a=nn.Linear(5, 6), b=nn.Linear(5, 6), n=nn.LayerNorm(6), c=nn.Linear(6, 2)), VEC),
    "product-chain": (lambda: Net(lambda m, x: m.d(F.relu(m.a(x)) * m.b(x) * m.c(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(5, 6), d=nn.Linear(6, 2)), VEC),
    "products-summed": (lambda: Net(lambda m, x: m.e(m.a(x) * m.b(x) + m.c(x) * m.d(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(5, 6), d=nn.Linear(5, 6), e=nn.Linear(6, 2)), VEC),
    "product-and-linear": (lambda: Net(lambda m, x: m.d(m.a(x) * m.b(x) + m.c(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(5, 6), d=nn.Linear(6, 2)), VEC),
    "shared-gate": (lambda: Net(_shared_gate, gate=nn.Linear(5, 6), up=nn.Linear(5, 6), up2=nn.Linear(5, 6), down=nn.Linear(6, 2), side=nn.Linear(6, 2)), VEC),
    "one-gate-for-all": (lambda: Net(lambda m, x: m.down(F.relu(m.gate(x)) * m.up(x)), gate=nn.Linear(5, 1), up=nn.Linear(5, 6), down=nn.Linear(6, 2)), VEC),
    "residual-product": (lambda: Net(_residual_product, stem=nn.Linear(5, 6), a=nn.Linear(6, 6), b=nn.Linear(6, 6), down=nn.Linear(6, 2)), VEC),
    "cube": (two(lambda h: F.relu(h) ** 3), VEC),
    "square-and-itself": (two(lambda h: F.relu(h) + h * h), VEC),
    "square-minus-product": (lambda: Net(lambda m, x: m.c(m.a(x) ** 2 + m.b(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(6, 2)), VEC),
    "root": (two(lambda h: (F.relu(h) + 0.0) ** 0.5), VEC),
    "glu": (lambda: nn.Sequential(nn.Linear(5, 12), nn.GLU(), nn.Linear(6, 2)), VEC),
    "gated-convolution": (lambda: Net(lambda m, x: m.c(F.max_pool2d(F.relu(m.a(x)) * m.b(x), 2).flatten(1)), a=nn.Conv2d(2, 4, 3), b=nn.Conv2d(2, 4, 3), c=nn.Linear(16, 2)), IMG),
    "glu-convolution": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.GLU(1), nn.Conv2d(4, 2, 3)), IMG),
    "divided": (lambda: Net(lambda m, x: m.c(m.a(x) / (1 + m.b(x) ** 2)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(6, 2)), VEC),
    "input-skip": (lambda: Net(lambda m, x: m.b(x + m.a(x)), a=nn.Linear(5, 5), b=nn.Linear(5, 2)), VEC),
    "input-concat": (lambda: Net(lambda m, x: m.b(torch.cat([x, F.relu(m.a(x))], -1)), a=nn.Linear(5, 4), b=nn.Linear(9, 2)), VEC),
    "rezero": (lambda: Net(lambda m, x: m.c(F.relu(m.a(x)) + m.s * m.b(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(6, 2), s=P(1)), VEC),
    "layer-scale": (lambda: Net(lambda m, x: m.c(m.a(x) + m.s * F.relu(m.b(x))), a=nn.Linear(5, 6), b=nn.Linear(5, 6), c=nn.Linear(6, 2), s=P(6)), VEC),
    "scale-of-input": (lambda: Net(lambda m, x: m.a(x * m.s), a=nn.Linear(5, 2), s=P(5)), VEC),
    "einsum": (lambda: Net(lambda m, x: torch.einsum("bhi,hio->bo", torch.einsum("bi,hio->bho", x, m.a), m.b), a=P(2, 5, 3), b=P(2, 3, 2)), VEC),
    "einsum-relu": (lambda: Net(lambda m, x: torch.einsum("bhi,hio->bho", torch.einsum("bi,hio->bho", x, m.a).relu(), m.b).flatten(1) @ m.c, a=P(2, 5, 3), b=P(2, 3, 2), c=P(4, 1)), VEC),
    "linear-with-bias-add": (lambda: Net(lambda m, x: (x @ m.a + m.s) @ m.b, a=P(5, 6), s=P(6), b=P(6, 2)), VEC),
    "positions-linear": (lambda: Net(lambda m, x: (x @ m.a + m.s).flatten(1) @ m.b, a=P(5, 6), s=P(4, 6), b=P(24, 2)), SEQ),
    "addmm": (lambda: Net(lambda m, x: torch.addmm(m.s, F.relu(x @ m.a), m.b), a=P(5, 6), b=P(6, 2), s=P(2)), VEC),
    "shared-without-bias": (lambda: Net(lambda m, x: m.b(F.relu(m.a(F.relu(m.a(x))))), a=nn.Linear(5, 5, bias=False), b=nn.Linear(5, 2)), VEC),
    "transposed-sharing": (lambda: Net(lambda m, x: F.relu(x @ m.w) @ m.w.T, w=P(5, 6)), VEC),
    "sliced-weight": (lambda: Net(lambda m, x: F.linear(F.relu(F.linear(x, m.w[:5])), m.w[5:]), w=P(8, 5)), VEC),
    "explicit-attention": (lambda: Net(_explicit_attention, **_attention_parts()), SEQ),
    "fused-attention": (lambda: Net(_fused_attention, **_attention_parts()), SEQ),
    "vit": (lambda: Net(_vit, patch=nn.Conv2d(2, 8, 3, 3), cls=P(1, 1, 8), pos=P(1, 5, 8), norm1=nn.LayerNorm(8), fc1=nn.Linear(8, 12), fc2=nn.Linear(12, 8), norm2=nn.RMSNorm(8), head=nn.Linear(8, 2)), IMG),
    "linear-convolutions": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(3, 4), nn.Linear(4, 1)), IMG),
    "linear-flatten": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3), nn.Linear(3, 1)), IMG),
    "linear-grouped": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 1)), IMG),
    "linear-depthwise": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3, groups=4), nn.Flatten(), nn.Linear(32, 1)), IMG),
    "grouped-transposed": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 5)), IMG),
    "one-channel-flipped": (lambda: Net(lambda m, x: m.b(torch.cat([m.a(x)[:, :2], m.a(x)[:, 2:].flip(-1)], 1).flatten(1)), a=nn.Conv2d(2, 4, 3), b=nn.Linear(64, 2)), IMG),
    "shuffle": (lambda: Net(_shuffle, conv1=nn.Conv2d(2, 4, 3), conv2=nn.Conv2d(4, 4, 3, groups=2), fc=nn.Linear(4, 2)), IMG),
    "pixel-shuffle": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(2, 1, 3)), IMG),
    "upsample": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 3)), IMG),
    "mixing-reshape": (lambda: Net(_mixing_reshape, conv=nn.Conv2d(2, 4, 3, padding=1), fc=nn.Linear(3, 2)), IMG),
    "adaptive-max": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)), IMG),
    "instance-norm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.ReLU(), nn.Conv2d(3, 2, 3)), IMG),
    "batch-norm-plain": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.Conv2d(3, 2, 3)), IMG),
    "rms-norm": (lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 2)), VEC),
    "query-key-norm": (lambda: Net(lambda m, x: m.o(F.scaled_dot_product_attention(m.nq(m.q(x)), m.nk(m.k(x)), m.v(x))), nq=nn.LayerNorm(6), nk=nn.LayerNorm(6), **_attention_parts()), SEQ),
    "grouped-attention": (lambda: Net(_grouped_attention, q=nn.Linear(5, 8), k=nn.Linear(5, 4), v=nn.Linear(5, 4), o=nn.Linear(8, 2)), SEQ),
    "einsum-attention": (lambda: Net(_einsum_attention, **_attention_parts()), SEQ),
    "linear-attention": (lambda: Net(_linear_attention, **_attention_parts()), SEQ),
    "written-rms-norm": (_written(lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-13)), VEC),
    "written-rms-norm-by-product": (_written(lambda h: h / ((h * h).mean(-1, keepdim=True) + 1e-13) ** 0.5), VEC),
    "written-layer-norm": (_written(_layer_norm), VEC),
    "written-by-variance": (_written(lambda h: (h - h.mean(-1, True)) * (h.var(-1, correction=0, keepdim=True) + 1e-13).rsqrt()), VEC),
    "written-by-deviation": (_written(lambda h: (h - h.mean(-1, True)) / (h.std(-1, keepdim=True) + 1e-13)), VEC),
    "unit-length": (_written(lambda h: F.normalize(h, dim=-1)), VEC),
    "statistic-read-twice": (two(lambda h: h * (r := torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-13)) + r), VEC),
    "hidden-returned": (lambda: Net(lambda m, x: (m.b(F.relu(m.a(x))), F.relu(m.a(x))), a=nn.Linear(5, 6), b=nn.Linear(6, 2)), VEC),
    "spectral-norm": (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 2)), VEC),
}  # fmt: skip


def _no_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        return h.mean(-1, keepdim=True)


def zoo(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = ZOO[name]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = make().double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    torch.set_rng_state(state)
    return model, x
