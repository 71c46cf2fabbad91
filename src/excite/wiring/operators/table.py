"""Every operator that is known, by its ATen name without overload; `name` covers the in-place `name_` too.

What is not here is unknown: whoever reads the table refuses it by name. Names are those that PyTorch dispatches to in
evaluation mode without gradients: composite ones (`linear`, `relu6`, `softmax`, `einsum`) arrive as their parts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.operators.row import Operator, Pattern, Refusal

OPERATORS: dict[str, Operator] = {}


def _add(names: str, linearity: Any, pattern: Pattern | None = None, **columns: Any) -> None:
    for name in names.split():
        if name in OPERATORS:
            raise ValueError(f"two rows for {name}")
        OPERATORS[name] = Operator(name, linearity, pattern, **columns)


def _product(names: str, *factors: str, fixed: tuple[str, ...] = (), unless: Refusal | None = None) -> None:
    """Linear in each of the factors, several arguments in one divided by a slash."""
    _add(names, "linear", factors=tuple(tuple(one.split("/")) for one in factors), fixed=fixed, unless=unless)


# -- refusals -----------------------------------------------------------------------------------------------------------
def _casts_bits(a: SimpleNamespace) -> str | None:
    return "reads the bits of numbers as another type" if getattr(a, "dtype", None) is not None else None


def _draws(a: SimpleNamespace) -> str | None:
    return "draws random numbers in training mode" if a.training else None


def _batch_statistics(a: SimpleNamespace) -> str | None:
    batch = getattr(a, "training", False) or getattr(a, "running_mean", None) is None
    return "normalizes by the statistics of the batch" if batch else None


def _complex(a: SimpleNamespace) -> str | None:
    return "of complex numbers is not piecewise linear" if a.self.is_complex() else None


def _largest_embedding(a: SimpleNamespace) -> str | None:
    return "takes the largest of the embeddings" if a.mode == 2 else None


def _multiplies(a: SimpleNamespace) -> str | None:
    return "multiplies what it scatters" if getattr(a, "reduce", None) == "multiply" else None


# -- constant: only shapes are read -------------------------------------------------------------------------------------
_add("empty_like zeros_like ones_like full_like new_empty new_empty_strided new_full new_ones new_zeros", "constant")

# -- linear: moving, repeating and adding numbers -----------------------------------------------------------------------
_add(
    "_reshape_alias _unsafe_view alias as_strided clone copy detach diag_embed diagonal expand flip permute "
    "pixel_shuffle pixel_unshuffle repeat roll rot90 select slice split split_with_sizes squeeze t transpose tril "
    "triu unbind unfold unsqueeze view_as_complex view_as_real _conj _to_copy _neg_view channel_shuffle col2im "
    "im2col unsafe_split unsafe_split_with_sizes",
    "linear",
)
_add("view", "linear", unless=_casts_bits)
_add(
    "add cat cumsum mean neg rsub stack sub sum nansum nan_to_num fill zero slice_scatter select_scatter "
    "diagonal_scatter",
    "linear",
)
_add(
    "embedding gather index index_add index_copy index_fill index_put index_select masked_fill scatter_add take "
    "_unsafe_index max_unpool2d max_unpool3d where",
    "linear",
)
_add("scatter", "linear", unless=_multiplies)
_add(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _fft_r2c _fft_c2r _fft_c2c",
    "linear",
)

# -- linear in each factor ----------------------------------------------------------------------------------------------
_product("mul", "self", "other")
_product("mm bmm", "self", "mat2")
_product("mv", "self", "vec")
_product("addmm", "mat1", "mat2")
_product("addmv", "mat", "vec")
_product("addr", "vec1", "vec2")
_product("baddbmm", "batch1", "batch2")
_product("addcmul", "tensor1", "tensor2")
_product("linear", "input", "weight")
_product("convolution", "input", "weight")
_product("_trilinear", "i1", "i2", "i3")
_product("lerp", "self/end", "weight")
_product("grid_sampler_2d grid_sampler_3d", "input", fixed=("grid",))
_product("_embedding_bag_forward_only _embedding_bag", "weight", "per_sample_weights", unless=_largest_embedding)
_product("addcdiv", "self/tensor1", fixed=("tensor2",))
_product(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm",
    "input",
    "weight",
    fixed=("running_mean", "running_var"),
    unless=_batch_statistics,
)
_add(
    "div",
    "piecewise",
    lambda a, r: (r,) if getattr(a, "rounding_mode", None) else (),
    fixed=("other",),
)

# -- piecewise linear: a kink at fixed places ---------------------------------------------------------------------------
_add("relu leaky_relu", "piecewise", lambda a, r: (a.self > 0,))
_add("abs", "piecewise", lambda a, r: (a.self > 0,), unless=_complex)
_add("_prelu_kernel", "piecewise", lambda a, r: (a.self > 0,), fixed=("weight",))
_add(
    "rrelu_with_noise", "piecewise", lambda a, r: (a.self > 0,), fixed=("noise",),
    unless=_draws,
)  # fmt: skip
_add("hardtanh", "piecewise", lambda a, r: (a.self > a.min_val, a.self > a.max_val))
_add("hardsigmoid", "piecewise", lambda a, r: (a.self > -3, a.self > 3))
_add("threshold", "piecewise", lambda a, r: (a.self > a.threshold,))
_add("hardshrink softshrink", "piecewise", lambda a, r: (a.self > -a.lambd, a.self > a.lambd))


def _clamp(a: SimpleNamespace, r: Tensor) -> tuple[Tensor | None, ...]:
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    crossed = (low > high).expand_as(r) if isinstance(low, Tensor) and isinstance(high, Tensor) else None
    return (None if low is None else a.self > low, None if high is None else a.self > high, crossed)


_add("clamp clamp_min clamp_max", "piecewise", _clamp)


# -- piecewise linear: one of several numbers is taken ------------------------------------------------------------------
def _one_sample(a: SimpleNamespace, found: Tensor) -> Tensor:
    """The pattern, if it is not taken over the batch; else a number of no sample, by which samples cannot be told apart."""
    dims = getattr(a, "dim", -1)
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    over = not axes or 0 in [d % max(1, a.self.dim()) for d in axes]
    return found.new_zeros((), dtype=torch.bool) if over else found


def _taken(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """The places of what was taken, where the operator gives them."""
    return (_one_sample(a, r[1]) if isinstance(r, tuple) else r.new_zeros((), dtype=torch.bool),)


def _attained(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """Where an extreme stands along the axes that were reduced; of ties, everywhere."""
    if hasattr(a, "other"):  # an alias of maximum or minimum
        return (a.self > a.other,)
    if isinstance(r, tuple) and not r[1].is_floating_point():
        return _taken(a, r)
    dims = getattr(a, "dim", None)
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    found = []
    for extreme in r if isinstance(r, tuple) else (r,):
        for axis in [] if getattr(a, "keepdim", False) else sorted(d % a.self.dim() for d in axes):
            extreme = extreme.unsqueeze(axis)
        found.append(_one_sample(SimpleNamespace(self=a.self, dim=axes), a.self == extreme))
    return tuple(found)


_add("max min amax amin aminmax", "piecewise", _attained)
_add("maximum minimum fmax fmin", "piecewise", lambda a, r: (a.self > a.other,))
_add("sort topk cummax cummin", "piecewise", _taken)


def _between(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """The place of what was taken, and which of the others are above it: without these the same one can be the middle of the
    others in several ways, between which another one is."""
    if not isinstance(r, tuple):
        return _taken(a, r)
    taken = r[0] if getattr(a, "keepdim", False) or not a.self.dim() else r[0].unsqueeze(getattr(a, "dim", -1))
    return (*_taken(a, r), _one_sample(a, a.self > taken))


_add("kthvalue median nanmedian", "piecewise", _between)
_add(
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "fractional_max_pool3d",
    "piecewise",
    lambda a, r: (r[1],),
)
# Without gradients it does not say which element it took.
_add("max_pool1d", "piecewise", lambda a, r: (torch.ops.aten.max_pool1d_with_indices(*a.args, **a.kwargs)[1],))

# -- piecewise linear: the remainder of a step --------------------------------------------------------------------------
_add("remainder", "piecewise", lambda a, r: (torch.floor_divide(a.self, a.other),), fixed=("other",))
_add("fmod", "piecewise", lambda a, r: (torch.div(a.self, a.other, rounding_mode="trunc"),), fixed=("other",))
_add("frac", "piecewise", lambda a, r: (torch.trunc(a.self),))
_add("copysign", "piecewise", lambda a, r: (a.self > 0, torch.as_tensor(a.other).expand_as(r) > 0))
_add("heaviside", "piecewise", lambda a, r: (a.self > 0, a.self < 0))

# -- constant on pieces -------------------------------------------------------------------------------------------------
_add(
    "eq ne gt ge lt le isnan isinf isposinf isneginf signbit logical_not logical_and logical_or",
    "discrete",
)
_add("logical_xor any all argmax argmin bucketize searchsorted count_nonzero", "discrete")
_add("floor ceil round trunc sign sgn", "discrete")
_add("floor_divide", "discrete", fixed=("other",))

# -- neither ------------------------------------------------------------------------------------------------------------
_add(
    "sigmoid tanh gelu silu mish softplus elu hardswish log_sigmoid_forward glu exp exp2 expm1 log log2 log10 log1p "
    "sqrt rsqrt pow reciprocal sin cos tan sinc atan atan2 asin acos sinh cosh asinh acosh atanh erf erfc erfinv "
    "lgamma digamma polygamma i0 hypot logit xlogy logaddexp logaddexp2 logsumexp logcumsumexp _softmax _log_softmax",
    "smooth",
)
_add(
    "native_layer_norm native_group_norm _fused_rms_norm linalg_vector_norm norm dist renorm _weight_norm_interface "
    "std var std_mean var_mean cumprod prod _cdist_forward _euclidean_dist _pdist_forward linalg_inv_ex _linalg_det "
    "_linalg_solve_ex linalg_qr _linalg_svd _linalg_eigh linalg_cholesky_ex",
    "smooth",
)
_add(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
    "_transformer_encoder_layer_fwd _native_multi_head_attention",
    "smooth",
)
