"""Every row of the table of operators: slopes on a slice and along segments against autograd and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from excite.errors import ModelError
from excite.lipschitz import along, local, region_map
from excite.wiring.operators import OPERATORS, Pieces
from excite.wiring.propagation.schema import name_of
from models import same_state, state_of

aten: Any = torch.ops.aten
W = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
BIAS = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.4, 0.25], dtype=torch.float64)
POSITIVE = BIAS.abs() + 0.5
KERNEL = torch.randn(4, 2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
ORDER = torch.tensor([3, 0, 5, 1])


def image(h: Tensor) -> Tensor:  # (B, 2, 3, 3)
    return torch.cat([h, -h, h.flip(1)], 1).view(-1, 2, 3, 3)


def volume(h: Tensor) -> Tensor:  # (B, 1, 2, 3, 3)
    return image(h)[:, None]


def written(h: Tensor) -> Tensor:
    """In place into a view of a buffer that does not depend on the input until then."""
    buffer = torch.zeros(len(h), 8, dtype=h.dtype)
    buffer[:, 1:7] = h
    return buffer.relu()


def named(room: Any, names: tuple[str, ...], use: Callable[[Any, Tensor], Any]) -> dict[str, Callable[[Tensor], Any]]:
    """An example for each name, which is a function in `room`."""
    return {name: partial(use, getattr(room, name)) for name in names}


# What each row is tried on: of h (B, 6), anything with B along the first axis.
EXAMPLES: dict[str, Callable[[Tensor], Any]] = {
    # linear: moving numbers
    "_reshape_alias": lambda h: aten._reshape_alias(h, [len(h), 2, 3], [6, 3, 1]),
    "_unsafe_view": lambda h: aten._unsafe_view(h, [len(h), 2, 3]),
    "alias": lambda h: aten.alias(h),
    "as_strided": lambda h: h.as_strided((len(h), 3), (6, 2)),
    "clone": lambda h: h.clone(),
    "copy": written,
    "detach": lambda h: h * (h.detach() > 0),
    "diag_embed": lambda h: aten.diag_embed(h),
    "diagonal": lambda h: h.view(-1, 2, 3).diagonal(dim1=1, dim2=2),
    "expand": lambda h: h[:, None].expand(-1, 2, 6),
    "flip": lambda h: h.flip(1),
    "permute": lambda h: h.view(-1, 2, 3).permute(0, 2, 1),
    "pixel_shuffle": lambda h: aten.pixel_shuffle(torch.cat([h, h], 1).view(-1, 4, 1, 3), 2),
    "pixel_unshuffle": lambda h: aten.pixel_unshuffle(torch.cat([h, h], 1).view(-1, 1, 2, 6), 2),
    "repeat": lambda h: h.repeat(1, 2),
    "roll": lambda h: h.roll(2, 1),
    "rot90": lambda h: h.view(-1, 2, 3).rot90(1, (1, 2)),
    "select": lambda h: h.select(1, 4),
    "slice": lambda h: h[:, 1:5:2],
    "split": lambda h: h.split(2, 1)[1],
    "split_with_sizes": lambda h: h.split_with_sizes([2, 4], 1)[1],
    "squeeze": lambda h: h[:, :, None].squeeze(2),
    "t": lambda h: h.t().t(),
    "transpose": lambda h: h.view(-1, 2, 3).transpose(1, 2),
    "tril": lambda h: h.view(-1, 2, 3).tril(),
    "triu": lambda h: h.view(-1, 2, 3).triu(),
    "unbind": lambda h: h.unbind(1)[2],
    "unfold": lambda h: h.unfold(1, 3, 2),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "view": lambda h: h.view(-1, 2, 3),
    "view_as_complex": lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2)) * (1 + 2j)),
    "view_as_real": lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2))),
    "_conj": lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2)).conj().resolve_conj()),
    "_neg_view": lambda h: torch._neg_view(h).resolve_neg(),
    "_to_copy": lambda h: h.float().double(),
    "channel_shuffle": lambda h: F.channel_shuffle(image(h).reshape(-1, 6, 3, 1), 2),
    "col2im": lambda h: F.fold(h.view(-1, 2, 3), (1, 4), (1, 2)),
    "im2col": lambda h: F.unfold(image(h), 2),
    "unsafe_split": lambda h: aten.unsafe_split(h, 2, 1)[1],
    "unsafe_split_with_sizes": lambda h: aten.unsafe_split_with_sizes(h, [2, 4], 1)[1],
    # linear: adding
    "add": lambda h: torch.add(h, h.flip(1), alpha=0.5) + 1,
    "cat": lambda h: torch.cat([h, 2 * h], 1),
    "cumsum": lambda h: h.cumsum(1),
    "mean": lambda h: h.mean(1),
    "neg": lambda h: -h,
    "rsub": lambda h: 1 - h,
    "stack": lambda h: torch.stack([h, -h], 1),
    "sub": lambda h: h - BIAS,
    "sum": lambda h: h.sum(1),
    "nansum": lambda h: h.nansum(1),
    "nan_to_num": lambda h: h.nan_to_num(),
    "fill": lambda h: h.clone().fill_(2.0) + h,
    "zero": lambda h: h.clone().zero_() + h,
    "slice_scatter": lambda h: torch.slice_scatter(h, 2 * h[:, :2], 1, 2, 4),
    "select_scatter": lambda h: torch.select_scatter(h, 2 * h[:, 0], 1, 2),
    "diagonal_scatter": lambda h: torch.diagonal_scatter(h.view(-1, 2, 3), 2 * h[:, :2], dim1=1, dim2=2),
    # linear: places
    "embedding": lambda h: F.embedding(ORDER, h.T).T,
    "gather": lambda h: h.gather(1, h.argsort(1)[:, :2]),
    "index": lambda h: h[:, ORDER],
    "index_add": lambda h: h.index_add(1, ORDER, h[:, :4]),
    "index_copy": lambda h: h.index_copy(1, ORDER, 3 * h[:, :4]),
    "index_fill": lambda h: h.index_fill(1, ORDER, 2.0),
    "index_put": lambda h: h.index_put((torch.arange(len(h))[:, None], ORDER), 3 * h[:, :4]),
    "index_select": lambda h: h.index_select(1, ORDER),
    "masked_fill": lambda h: h.masked_fill(h > 0.3, 0.1),
    "scatter": lambda h: h.scatter(1, ORDER.expand(len(h), 4), 3 * h[:, :4]),
    "scatter_add": lambda h: h.scatter_add(1, ORDER.expand(len(h), 4), 3 * h[:, :4]),
    "take": lambda h: h.take(torch.arange(6 * len(h)).view(-1, 6)[:, ORDER]),
    "_unsafe_index": lambda h: aten._unsafe_index(h, [None, ORDER]),
    "max_unpool2d": lambda h: F.max_unpool2d(*F.max_pool2d(image(h)[:, :, :2, :2], 2, return_indices=True), 2),
    "max_unpool3d": lambda h: F.max_unpool3d(*F.max_pool3d(volume(h)[..., :2, :2], 2, return_indices=True), 2),
    "where": lambda h: torch.where(h > h.flip(1), 2 * h, BIAS),
    # linear: padding, averaging, resizing
    "constant_pad_nd": lambda h: F.pad(h, (1, 2), value=0.5),
    "reflection_pad1d": lambda h: F.pad(h.view(-1, 2, 3), (1, 2), mode="reflect"),
    "reflection_pad2d": lambda h: F.pad(image(h), (1, 2, 1, 1), mode="reflect"),
    "reflection_pad3d": lambda h: F.pad(volume(h), (1, 2, 1, 1, 1, 1), mode="reflect"),
    "replication_pad1d": lambda h: F.pad(h.view(-1, 2, 3), (1, 2), mode="replicate"),
    "replication_pad2d": lambda h: F.pad(image(h), (1, 2, 1, 1), mode="replicate"),
    "replication_pad3d": lambda h: F.pad(volume(h), (1, 2, 1, 1, 1, 1), mode="replicate"),
    "avg_pool2d": lambda h: F.avg_pool2d(image(h), 2),
    "avg_pool3d": lambda h: F.avg_pool3d(volume(h), 2),
    "_adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(image(h), 2),
    "_adaptive_avg_pool3d": lambda h: F.adaptive_avg_pool3d(volume(h), 2),
    "upsample_nearest1d": lambda h: F.interpolate(h.view(-1, 2, 3), scale_factor=2.0),
    "upsample_nearest2d": lambda h: F.interpolate(image(h), scale_factor=2.0),
    "upsample_nearest3d": lambda h: F.interpolate(volume(h), scale_factor=2.0),
    "_upsample_nearest_exact1d": lambda h: F.interpolate(h.view(-1, 2, 3), scale_factor=2.0, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda h: F.interpolate(image(h), scale_factor=2.0, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda h: F.interpolate(volume(h), scale_factor=2.0, mode="nearest-exact"),
    "upsample_linear1d": lambda h: F.interpolate(h.view(-1, 2, 3), scale_factor=2.0, mode="linear"),
    "upsample_bilinear2d": lambda h: F.interpolate(image(h), scale_factor=2.0, mode="bilinear"),
    "upsample_bicubic2d": lambda h: F.interpolate(image(h), scale_factor=2.0, mode="bicubic"),
    "upsample_trilinear3d": lambda h: F.interpolate(volume(h), scale_factor=2.0, mode="trilinear"),
    "_upsample_bilinear2d_aa": lambda h: F.interpolate(image(h), 2, mode="bilinear", antialias=True),
    "_upsample_bicubic2d_aa": lambda h: F.interpolate(image(h), 2, mode="bicubic", antialias=True),
    "_fft_r2c": lambda h: torch.view_as_real(torch.fft.rfft(h)),
    "_fft_c2r": lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2, 6),
    "_fft_c2c": lambda h: torch.view_as_real(torch.fft.fft(torch.view_as_complex(h.view(-1, 3, 2)))),
    # linear in each factor
    "mul": lambda h: h * BIAS * (h > 0).double(),
    "mm": lambda h: h @ W,
    "bmm": lambda h: torch.bmm(h.view(-1, 2, 3), W[:3, :3].expand(len(h), 3, 3)),
    "mv": lambda h: torch.mv(h, BIAS),
    "addmm": lambda h: torch.addmm(h, h, W, beta=0.5),
    "addmv": lambda h: torch.addmv(h[:, 0], h, BIAS),
    "addr": lambda h: torch.addr(h, h[:, 0], BIAS),
    "_embedding_bag_forward_only": lambda h: F.embedding_bag(
        ORDER.expand(len(h), 4), W, per_sample_weights=h[:, :4].contiguous(), mode="sum"
    ),
    "baddbmm": lambda h: torch.baddbmm(h.view(-1, 2, 3), h.view(-1, 2, 3), W[:3, :3].expand(len(h), 3, 3)),
    "addcmul": lambda h: torch.addcmul(h, h, BIAS, value=0.5),
    "convolution": lambda h: F.conv2d(image(h), KERNEL, padding=1),
    "_trilinear": lambda h: F.bilinear(h, POSITIVE.expand_as(h), torch.stack([W, W.T])),
    "lerp": lambda h: torch.lerp(h, 3 * h, 0.25) + torch.lerp(h, BIAS, POSITIVE) + torch.lerp(BIAS, W[0], h),
    "grid_sampler_2d": lambda h: F.grid_sample(
        image(h), (W[:2, :4].tanh().view(1, 2, 2, 2)).expand(len(h), 2, 2, 2), align_corners=False
    ),
    "grid_sampler_3d": lambda h: F.grid_sample(
        volume(h), (W[:2, :3].tanh().view(1, 1, 1, 2, 3)).expand(len(h), 1, 1, 2, 3), align_corners=False
    ),
    "addcdiv": lambda h: torch.addcdiv(h, h, POSITIVE),
    "native_batch_norm": lambda h: F.batch_norm(h, BIAS, POSITIVE, POSITIVE, BIAS),
    "div": lambda h: h / POSITIVE + torch.div(h, 0.5, rounding_mode="floor"),
    # piecewise
    "relu": F.relu,
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "abs": lambda h: h.abs(),
    "_prelu_kernel": lambda h: F.prelu(h, POSITIVE / 4),
    "rrelu_with_noise": lambda h: F.rrelu(h, 0.1, 0.4),
    "hardtanh": lambda h: F.hardtanh(h, -0.5, 1.0),
    "hardsigmoid": lambda h: F.hardsigmoid(4 * h),
    "threshold": lambda h: F.threshold(h, 0.2, -1.0),
    "hardshrink": lambda h: F.hardshrink(h, 0.4),
    "softshrink": lambda h: F.softshrink(h, 0.4),
    "clamp": lambda h: h.clamp(-0.5, 0.7) + h.clamp(h.flip(1) - 1, h.roll(1, 1)),
    "clamp_min": lambda h: h.clamp_min(-0.5) + h.clamp(min=BIAS),
    "clamp_max": lambda h: h.clamp_max(0.5),
    "max": lambda h: h.view(-1, 2, 3).max(2).values,
    "min": lambda h: h.view(-1, 2, 3).min(2).values,
    "amax": lambda h: h.view(-1, 2, 3).relu().amax((1, 2)) + h.amax(1),
    "amin": lambda h: h.view(-1, 2, 3).amin(2, keepdim=True),
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=1), 1),
    "maximum": lambda h: torch.maximum(h, BIAS),
    "minimum": lambda h: torch.minimum(h, h.flip(1)),
    "fmax": lambda h: torch.fmax(h, BIAS),
    "fmin": lambda h: torch.fmin(h, BIAS),
    "sort": lambda h: h.relu().sort(1).values,
    "topk": lambda h: h.topk(2, 1).values,
    "kthvalue": lambda h: h.kthvalue(3, 1).values,
    "median": lambda h: h.median(1).values,
    "nanmedian": lambda h: h.nanmedian(1).values,
    "cummax": lambda h: h.cummax(1).values,
    "cummin": lambda h: h.cummin(1).values,
    "max_pool2d_with_indices": lambda h: F.max_pool2d(image(h), 2, stride=1),
    "max_pool3d_with_indices": lambda h: F.max_pool3d(volume(h), 2, stride=1),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(image(h), 2),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(volume(h), 1),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(
        image(h), 2, 2, _random_samples=torch.full((len(h), 2, 2), 0.3, dtype=h.dtype)
    ),
    "fractional_max_pool3d": lambda h: F.fractional_max_pool3d(
        F.pad(volume(h), (0, 1, 0, 1)), (1, 2, 2), (1, 2, 2), _random_samples=torch.full((len(h), 1, 3), 0.3, dtype=h.dtype)
    ),
    "remainder": lambda h: torch.remainder(h, 0.7),
    "fmod": lambda h: torch.fmod(h, 0.7),
    "frac": lambda h: (2 * h).frac(),
    "copysign": lambda h: torch.copysign(h, h.flip(1)),
    "heaviside": lambda h: h + torch.heaviside(h.detach(), BIAS),
    # discrete: a factor that is constant on each piece
    **named(torch, ("eq", "ne", "gt", "ge", "lt", "le"), lambda function, h: h * function(h, BIAS).double()),
    **named(torch, ("floor", "ceil", "trunc", "sign", "sgn", "signbit", "logical_not", "isnan", "isinf", "isposinf",
                    "isneginf"), lambda function, h: h * (1 + function(2 * h))),
    **named(torch, ("logical_and", "logical_or", "logical_xor"), lambda function, h: h * (1 + function(h, h.flip(1).floor()))),
    "round": lambda h: h * h.round(decimals=1),
    "floor_divide": lambda h: h * torch.floor_divide(h.detach(), 0.7),
    "any": lambda h: h * h.any(1)[:, None],
    "all": lambda h: h * h.all(1)[:, None],
    "argmax": lambda h: h * h.argmax(1)[:, None],
    "argmin": lambda h: h * h.argmin(1)[:, None],
    "bucketize": lambda h: h * torch.bucketize(h, BIAS.sort().values),
    "searchsorted": lambda h: h * torch.searchsorted(BIAS.sort().values, h),
    "count_nonzero": lambda h: h * aten.count_nonzero(h.relu(), [1])[:, None],
    # constant: shapes alone
    **named(torch, ("zeros_like", "ones_like"), lambda function, h: h + function(h)),
    "empty_like": lambda h: h + torch.empty_like(h).fill_(1.0),
    "full_like": lambda h: h + torch.full_like(h, 2.0),
    "new_empty": lambda h: h + h.new_empty(6).fill_(1.0),
    "new_empty_strided": lambda h: h + h.new_empty_strided((6,), (1,)).fill_(1.0),
    "new_full": lambda h: h + h.new_full((6,), 2.0),
    "new_ones": lambda h: h + h.new_ones(6),
    "new_zeros": lambda h: h + h.new_zeros(6),
}  # fmt: skip

UNARY = ("sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin",
         "cos", "tan", "sinc", "atan", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma",
         "digamma", "i0", "logit")  # fmt: skip
NEURAL = ("gelu", "silu", "mish", "softplus", "elu", "hardswish", "glu")


def square(h: Tensor) -> Tensor:
    return torch.eye(3, dtype=h.dtype) * 5 + h.view(-1, 2, 3)[:, :1] * 0.1


# What is refused, by the name it arrives under.
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    **named(torch, ("logaddexp", "logaddexp2", "atan2", "hypot"), lambda function, h: function(h, BIAS)),
    **named(torch, UNARY, lambda function, h: function(h)),
    **named(F, NEURAL, lambda function, h: function(h)),
    "log_sigmoid_forward": F.logsigmoid,
    "pow": lambda h: h**2,
    "polygamma": lambda h: torch.polygamma(1, h),
    "xlogy": lambda h: torch.xlogy(h, h),
    "logsumexp": lambda h: h.logsumexp(1),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "_softmax": lambda h: h.softmax(1),
    "_log_softmax": lambda h: h.log_softmax(1),
    "native_layer_norm": lambda h: F.layer_norm(h, (6,)),
    "native_group_norm": lambda h: F.group_norm(h, 2),
    "linalg_vector_norm": lambda h: h.norm(dim=1),
    "norm": lambda h: aten.norm(h, 2, [1]),
    "dist": lambda h: torch.dist(h, BIAS.expand_as(h)),
    "renorm": lambda h: h.renorm(2, 0, 0.1),
    "_weight_norm_interface": lambda h: torch._weight_norm(h, POSITIVE[:, None][: len(h), :1], 0),
    "std": lambda h: h.std(1),
    "var": lambda h: h.var(1),
    "std_mean": lambda h: torch.std_mean(h, 1)[0],
    "var_mean": lambda h: torch.var_mean(h, 1)[0],
    "cumprod": lambda h: h.cumprod(1),
    "prod": lambda h: h.prod(1),
    "_cdist_forward": lambda h: torch.cdist(h, W, p=1.5),
    "_euclidean_dist": lambda h: torch.cdist(h, torch.cat([W] * 6)),
    "_pdist_forward": lambda h: torch.pdist(h),
    "linalg_inv_ex": lambda h: torch.linalg.inv(square(h)),
    "_linalg_det": lambda h: torch.linalg.det(square(h)),
    "_linalg_solve_ex": lambda h: torch.linalg.solve(square(h), square(h)),
    "linalg_qr": lambda h: torch.linalg.qr(square(h)).R,
    "_linalg_svd": lambda h: torch.linalg.svdvals(square(h)),
    "_linalg_eigh": lambda h: torch.linalg.eigvalsh(square(h)),
    "linalg_cholesky_ex": lambda h: torch.linalg.cholesky(square(h)),
    "mse_loss": lambda h: F.mse_loss(h, BIAS.expand_as(h), reduction="none"),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, BIAS.expand_as(h), reduction="none"),
    "huber_loss": lambda h: F.huber_loss(h, BIAS.expand_as(h), reduction="none"),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy(h.clamp(0, 1), BIAS.abs().expand_as(h), reduction="none"),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, BIAS.expand_as(h), reduction="none"),
    "binary_cross_entropy_with_logits": lambda h: aten.binary_cross_entropy_with_logits(h, BIAS.expand_as(h)),
}  # fmt: skip

PIECES = {name: row.pieces for name, row in OPERATORS.items() if row.pieces is not None}
# Rows that no call reaches on a CPU in float64: composite functions, kernels of other devices, fused layers.
ELSEWHERE = {
    "celu", "selu", "log_sigmoid", "square", "softmax", "log_softmax", "_safe_softmax", "layer_norm", "group_norm",
    "instance_norm", "rms_norm", "scaled_dot_product_attention",
    "linear", "max_pool1d", "_embedding_bag", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm", "miopen_batch_norm", "_fused_rms_norm", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell",
    "mkldnn_rnn_layer", "_cudnn_rnn", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
}  # fmt: skip


class Example(nn.Module):
    """The operator between two affine maps; its result is weighed so that no two of its elements cancel."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function
        self.first = nn.Parameter(W / 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(x @ self.first + BIAS).reshape(len(x), -1).double()
        return found @ torch.linspace(1, 2, found.shape[1], dtype=found.dtype).cos()[:, None] + x[:, :1]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(name_of(func))
        return func(*args, **(kwargs or {}))


def points(count: int, seed: int) -> Tensor:
    return 2 * torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_row_is_tried() -> None:
    assert PIECES.keys() == EXAMPLES.keys() | REFUSED.keys() | ELSEWHERE
    assert {name for name, pieces in PIECES.items() if pieces.linearity == "smooth"} >= REFUSED.keys()
    assert not EXAMPLES.keys() & REFUSED.keys()
    assert len(REFUSED) >= 10


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_regions_have_the_slopes_of_autograd_and_differences(name: str) -> None:
    model = Example(EXAMPLES[name])
    with Names() as names, torch.no_grad():
        model(points(4, 0))
    assert name in names.found  # the example is about this row
    before = state_of(model)
    origin, right, up = points(3, 1)
    try:
        model(points(2, 0).requires_grad_()).sum().backward()
        model.zero_grad()
    except RuntimeError as error:
        if "is not implemented" in str(error):
            pytest.skip(f"torch {torch.__version__} has no derivative of {name}")
        raise
    found = region_map(model, origin, right, up, size=(11, 13))
    flat = found.points.reshape(-1, 6)
    # Every cell by itself: had two pieces been taken for one, its slope would be that of another place.
    torch.testing.assert_close(found.slopes.reshape(-1), local(model, flat), rtol=1e-9, atol=1e-12)
    # On two sides, but not across a kink: where both neighbours are in the same region.
    step = 1e-6 * right
    with torch.no_grad():
        difference = (model(flat + step) - model(flat - step))[:, 0] / 2e-6
    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf)
    if name != "_to_copy":  # single precision is too coarse for a difference
        away = ((difference - gradient @ right).abs() > 1e-6).sum()
        assert int(away) <= 1, f"{int(away)} of {len(flat)} cells"  # one may lie on a kink
    start, end = points(3, 2), points(3, 3)
    walk = along(model, start, end)
    if PIECES[name].linearity in ("piecewise", "discrete") and name not in ("isnan", "isinf", "isposinf", "isneginf", "any", "all",
                                                                            "logical_not", "eq", "ne"):  # fmt: skip
        assert int(walk.pieces.max()) > 1  # there is a kink to find
    places = torch.linspace(0.003, 0.997, 60, dtype=torch.float64)
    for i in range(3):
        piece = torch.searchsorted(walk.breaks[i], places).clamp(1, len(walk.slopes[i])) - 1
        inside = (places[:, None] - walk.breaks[i]).abs().amin(1) > 1e-9
        dense = local(model, start[i] + places[:, None] * (end[i] - start[i]))
        torch.testing.assert_close(walk.slopes[i][piece][inside], dense[inside], rtol=1e-9, atol=1e-12)
    assert same_state(before, state_of(model))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_piecewise_linear_is_refused_by_name_by_both(name: str) -> None:
    def positive(h: Tensor) -> Tensor:  # where all of them are defined
        return REFUSED[name](h.clamp(min=0.1, max=0.9))

    model = Example(positive)
    x = points(4, 0)
    for attempt in (lambda: region_map(model, *x[:3], size=4), lambda: along(model, x, -x)):
        with pytest.raises(ModelError, match=f"piecewise-linear model; {name.strip('_')} is not"):
            attempt()


PRODUCTS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "mul": ("two signals", lambda h: h * h.flip(1)),
    "bmm": ("two signals", lambda h: h.view(-1, 2, 3) @ h.view(-1, 3, 2)),
    "addcmul": ("two signals", lambda h: torch.addcmul(BIAS.expand_as(h), h, h)),
    "addcdiv": ("divides", lambda h: torch.addcdiv(BIAS.expand_as(h), BIAS.expand_as(h), h)),
    "div": ("divides", lambda h: BIAS / (1 + h.abs())),
    "lerp": ("two signals", lambda h: torch.lerp(h, BIAS, h)),
    "_trilinear": ("two signals", lambda h: F.bilinear(h, h, torch.stack([W, W]))),
    "einsum": ("two signals", lambda h: torch.einsum("bi,bi->b", h, h)),
    "prelu": ("weight", lambda h: torch._prelu_kernel(h, h)),
    "grid": ("grid", lambda h: F.grid_sample(image(h), h.clamp(-1, 1).view(-1, 3, 1, 2), align_corners=False)),
    "floor_divide": ("other", lambda h: torch.floor_divide(BIAS.expand_as(h), h)),
    "scatter": (r"scatter\.reduce: the operator table", lambda h: h.scatter(1, ORDER.expand(len(h), 4), h[:, :4], reduce="multiply")),
    "batch_norm": ("statistics of the batch", lambda h: F.batch_norm(h, None, None, training=True)),
    "rrelu": ("random", lambda h: F.rrelu(h, training=True)),
    "complex abs": ("complex", lambda h: torch.view_as_complex(h.view(-1, 3, 2)).abs()),
    "bits": ("bits", lambda h: h.view(torch.int64).double()),
    "unknown": ("scatter_reduce: the operator table .* has no column 'pieces'", lambda h: h.scatter_reduce(1, ORDER.expand(len(h), 4), h, "prod")),
    "item": ("_local_scalar_dense: the operator table .* has no column 'pieces'", lambda h: h * float(h[0, 0])),
    "branch": ("branches", lambda h: h if bool((h > 0).all()) else -h),
    "mask": ("samples", lambda h: h[h > 0].sum() + h),
    "over the batch": ("cannot separate samples", lambda h: h - h.amax(0)),
    "largest of all": ("cannot separate samples", lambda h: h - h.max()),
    "sorted over the batch": ("cannot separate samples", lambda h: h.sort(0).values),
    "written": ("two signals", lambda h: written(h) * written(h)),
    "dropout": ("draws random numbers", lambda h: F.dropout(h, training=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_arguments_for_which_an_operator_is_not_piecewise_linear(name: str) -> None:
    words, function = PRODUCTS[name]
    model, x = Example(function), points(4, 0)
    state = torch.get_rng_state()
    for attempt in (lambda: region_map(model, *x[:3], size=4), lambda: along(model, x, -x)):
        with pytest.raises(ModelError, match=words):
            attempt()
    torch.set_rng_state(state)


def test_a_row_that_were_wrong_would_be_noticed_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Example(torch.exp), points(3, 0)
    monkeypatch.setattr("excite.lipschitz.signatures._pieces_of", lambda func: Pieces("linear"))
    for attempt in (lambda: region_map(model, *x, size=4), lambda: along(model, x, -x)):
        with pytest.raises(ModelError, match="bends"):
            attempt()


@pytest.mark.parametrize("name", ["hardtanh_", "clamp_", "relu_", "leaky_relu_", "threshold_", "abs_", "floor_"])
def test_in_place_operators_have_the_regions_of_their_twins(name: str) -> None:
    arguments = {"hardtanh_": (-0.5, 0.7), "clamp_": (-0.5, 0.7), "threshold_": (0.2, -1.0)}.get(name, ())
    plain, written = getattr(aten, name[:-1]), getattr(aten, name)
    twin, model = Example(lambda h: plain(h, *arguments)), Example(lambda h: written(h + 0, *arguments))
    x = points(3, 4)
    a, b = (region_map(one, *x, size=12) for one in (twin, model))
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.slopes, b.slopes)
    assert a.count > 3


def test_custom_operators_are_not_taken_for_those_of_pytorch() -> None:
    with torch.library._scoped_library("excite_test", "FRAGMENT") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x**3, "CompositeExplicitAutograd")
        model, x = Example(torch.ops.excite_test.relu), points(3, 0)
        with pytest.raises(ModelError, match="excite_test::relu: the operator table"):
            along(model, x, -x)
