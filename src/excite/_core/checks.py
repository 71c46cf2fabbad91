"""The gate for what users pass: modules, tensors, weights, labels and numbers, each refused in one line.

A check here either returns the value in the type that the code behind it works with, or raises an `ExciteError` that says
what was expected, what came and what to do. `check_weights` and `check_values` read tensors and wait for the device: they
have no place in the training step.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from excite.errors import ExciteError, InputError, ModelError

P = ParamSpec("P")
R = TypeVar("R")
Batch = (
    Tensor | tuple[Any, ...] | dict[str, Any]
)  # the arguments of a model; the first axis of each tensor is the batch axis
Pick = str | int | Callable[[Any], Tensor] | None
"""Which part of a model's return value is its output: a key, an index, a function, or None for the value itself."""
Bounds = tuple[float | Tensor, float | Tensor]  # (low, high) of a model's input
LARGEST = 2**31 - 1  # of a count: what the kernels of torch index with


def shown(value: object) -> str:
    """A value in one short line: tensors, arrays and modules by kind and shape, anything else by its repr."""
    if isinstance(value, Tensor):
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        shape = "nested" if value.is_nested else f"shape {tuple(value.shape)}"
        return f"a {layout}tensor of {str(value.dtype).removeprefix('torch.')}, {shape}, on {value.device.type}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} module"
    try:
        line = " ".join(repr(value).split())
    except Exception:  # a repr of the user's own, or an integer with too many digits
        return f"a {type(value).__name__}"
    return line if len(line) <= 80 else f"{line[:77]}..."


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


# -- numbers -----------------------------------------------------------------------------------------------------------
def as_scalar(value: object) -> object:
    """The number in a tensor or array of one element; anything else as it is. Waits for the device that the tensor is on."""
    if isinstance(value, Tensor):
        readable = value.layout is torch.strided and not value.is_nested and value.device.type != "meta"
        return value.item() if readable and value.numel() == 1 else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number of Python or numpy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number of Python or numpy; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(value: object, name: str, minimum: int = 1, maximum: int = LARGEST, *, also: str = "") -> int:
    """A whole number from `minimum` to `maximum`; `also` says what else the caller takes, such as "or None"."""
    number = as_scalar(value)
    if not is_whole(number) or number < minimum:
        raise InputError(
            f"{name}: expected a whole number of at least {minimum}{also and f', {also}'}; got {shown(value)}"
        )
    if number > maximum:
        raise InputError(
            f"{name}: expected a whole number of at most {maximum}; got {shown(value)}: choose a smaller one"
        )
    return int(number)


def check_seed(value: object, name: str = "seed") -> int:
    """A whole number that torch's generators take."""
    return check_count(value, name, 0, 2**64 - 1)


def check_number(
    value: object, name: str, minimum: float = -math.inf, maximum: float = math.inf, *, above: bool = False
) -> float:
    """A finite number from `minimum` (`above`: greater than it) to `maximum`."""
    scalar, number = as_scalar(value), math.nan
    if is_number(scalar):
        try:
            number = float(scalar)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number) or not minimum <= number <= maximum or (above and number == minimum):
        low = "" if minimum == -math.inf else f" above {minimum:g}" if above else f" of at least {minimum:g}"
        high = "" if maximum == math.inf else f"{' and' if low else ''} at most {maximum:g}"
        raise InputError(f"{name}: expected a finite number{low}{high}; got {shown(value)}")
    return number


def check_numbers(values: object, name: str, minimum: float = -math.inf) -> list[float]:
    """Finite numbers of at least `minimum`, in a list, a tuple or anything else that has an order, or in a tensor or array of one axis."""
    is_vector = isinstance(values, Tensor | np.ndarray) and values.ndim == 1
    if not is_vector and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        raise InputError(f"{name}: expected a list of numbers, such as [0.1, 0.2]; got {shown(values)}")
    return [check_number(value, name, minimum) for value in (to_array(name, values) if is_vector else values)]  # type: ignore[attr-defined]


def is_flag(value: object) -> TypeGuard[bool]:
    """Whether it is True or False, of Python or numpy."""
    return isinstance(value, bool | np.bool_)


def check_flag(value: object, name: str) -> bool:
    """True or False."""
    scalar = as_scalar(value)
    if not is_flag(scalar):
        raise InputError(f"{name}: expected True or False; got {shown(value)}")
    return bool(scalar)


def check_maybe(value: object, name: str) -> bool | None:
    """True, False, or None for what is not known."""
    if value is not None and not is_flag(as_scalar(value)):
        raise InputError(f"{name}: expected True, False or None for not known; got {shown(value)}")
    return None if value is None else bool(value)


def check_text(value: object, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InputError(f"{name}: expected a string; got {shown(value)}")
    return value


def check_path(value: object, name: str = "path") -> Path:
    """A path, from a string or an object of pathlib."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or "\0" in os.fspath(value):
        raise InputError(f"{name}: expected a path, a string or a pathlib.Path; got {shown(value)}")
    return Path(value)


def check_choice(value: object, name: str, choices: Iterable[str]) -> str:
    """One of a few words."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise InputError(f"{name}: expected {', '.join(map(repr, names[:-1]))} or {names[-1]!r}; got {shown(value)}")
    return value


def check_pair(value: object, name: str) -> tuple[float, float]:
    """(low, high), finite numbers with low < high."""
    is_vector = isinstance(value, Tensor | np.ndarray) and value.ndim == 1
    if not (is_vector or isinstance(value, tuple | list)) or len(value) != 2:  # type: ignore[arg-type]
        raise InputError(f"{name}: expected (low, high) with low < high; got {shown(value)}")
    low, high = (check_number(bound, name) for bound in value)  # type: ignore[attr-defined]
    if not low < high:
        raise InputError(f"{name}: expected (low, high) with low < high; got {shown(value)}")
    return low, high


# -- tensors -----------------------------------------------------------------------------------------------------------
_shapes_only: ContextVar[bool] = ContextVar("_shapes_only", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """A context in which tensors on the meta device, which have a shape and no values, are accepted as inputs and outputs."""
    token = _shapes_only.set(True)
    try:
        yield
    finally:
        _shapes_only.reset(token)


def check_dense(tensor: Tensor, what: str = "inputs") -> Tensor:
    """A tensor whose values can be read: strided, on a device with memory. Reads none of them."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise InputError(f"expected dense {what}; got {shown(tensor)}: convert with .to_dense() or .dequantize()")
    if tensor.device.type == "meta" and not _shapes_only.get():
        raise InputError(f"expected {what} with values; got {shown(tensor)}: move them to a device that has memory")
    return tensor


def check_tensor(value: object, what: str, *dims: int, floating: bool = True) -> Tensor:
    """A dense tensor with one of these numbers of axes, of floating-point numbers unless `floating` is False."""
    if not isinstance(value, Tensor):
        raise InputError(f"expected {what} as a tensor; got {shown(value)}: convert with torch.as_tensor")
    check_dense(value, what)
    if floating and not value.is_floating_point():
        raise InputError(f"expected {what} as floating-point numbers; got {shown(value)}: convert with .double()")
    if dims and value.dim() not in dims:
        raise InputError(f"expected {what} with {' or '.join(map(str, dims))} axes; got {shown(value)}")
    return value


def check_tensors(values: object, what: str) -> list[Tensor]:
    """A list of at least one dense tensor of real numbers, all of them finite."""
    if isinstance(values, Tensor | str | bytes | dict) or not isinstance(values, Iterable):
        raise InputError(f"expected {what} as a list of tensors; got {shown(values)}")
    tensors = [check_tensor(value, what, floating=False) for value in values]
    if not tensors:
        raise InputError(f"expected {what} as a list of at least one tensor; got none")
    for value in tensors:
        if value.is_complex():
            raise InputError(f"expected {what} as real numbers; got {shown(value)}")
    check_values(tensors, what)
    return tensors


def same_shapes(first_values: object, other: object, what: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two lists of finite tensors, the shapes of one as those of the other. Waits for the device."""
    first, second = check_tensors(first_values, what), check_tensors(other, what)
    if [t.shape for t in first] != [t.shape for t in second]:
        shapes = " and ".join(shown([tuple(t.shape) for t in side]) for side in (first, second))
        raise InputError(f"expected two lists of {what} of the same shapes; got {shapes}")
    return first, second


def check_values(tensors: Iterable[Tensor], what: str) -> None:
    """Refuse NaN and infinite values. Waits for the device."""
    for tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"expected finite {what}; {bad} of {tensor.numel()} values are NaN or infinite: clean them"
            )


def to_array(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Real numbers in a tensor, an array or nested lists, as a new float64 array on the CPU."""
    if isinstance(values, Tensor):
        values = check_dense(values, name).detach().cpu()
        if values.is_complex():
            raise InputError(f"{name}: expected real numbers; got {shown(values)}")
        values = values.double().numpy()
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{name}: expected real numbers; got {shown(values)}") from error


# -- inputs and layers of a model ----------------------------------------------------------------------------------------
def check_layers(layers: object) -> str | tuple[str, ...]:
    """Returns "all", "input", or the names of at least one layer."""
    if isinstance(layers, str):
        if layers not in ("all", "input"):
            raise InputError(
                f"layers: expected 'all', 'input' or a list of layer names; got {shown(layers)}: for one layer give [{layers!r}]"
            )
        return layers
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(name, str) for name in layers):
        raise InputError(f"layers: expected 'all', 'input' or a list of at least one layer name; got {shown(layers)}")
    return tuple(layers)


def check_bounds(bounds: object) -> Bounds | None:
    """(low, high) with low < high, numbers or tensors; None for no bounds."""
    if bounds is None:
        return None
    if not isinstance(bounds, tuple | list | np.ndarray) or getattr(bounds, "ndim", 1) == 0 or len(bounds) != 2:
        raise InputError(f"bounds: expected (low, high); got {shown(bounds)}")
    if not all(isinstance(b, Tensor) or is_number(b) for b in bounds):
        raise InputError(f"bounds: expected numbers or tensors; got {shown(bounds)}")
    try:
        low, high = (check_dense(b, "bounds") if isinstance(b, Tensor) else float(b) for b in bounds)
        ordered = bool((torch.as_tensor(low) < torch.as_tensor(high)).all())
    except (RuntimeError, OverflowError) as error:
        raise InputError(
            f"bounds: expected numbers, or tensors that broadcast to the inputs; got {shown(bounds)}"
        ) from error
    if not ordered:
        raise InputError(f"bounds: expected low < high; got {shown(bounds)}")
    return low, high


# -- batches and outputs of a model -------------------------------------------------------------------------------------
def _is_cache(leaf: object) -> bool:
    return hasattr(leaf, "get_seq_length")  # those of Transformers


def tensors(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in order; an InputError if it holds a key-value cache, which has its own number of samples and is changed."""
    leaves = tree_leaves(batch, is_leaf=_is_cache)
    if any(map(_is_cache, leaves)):
        raise InputError("the example holds a key-value cache: expected whole sequences without past_key_values")
    leaves = [check_dense(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    if not leaves:
        raise InputError(f"expected a tensor, a tuple or a dict of tensors as input; got {type(batch).__name__}")
    return leaves


def batch_size(batch: Batch) -> int:
    """Number of samples of a batch, at least one."""
    first = tensors(batch)[0]
    if first.dim() == 0:
        raise InputError("expected inputs with a batch axis in front; got a tensor without axes")
    if first.shape[0] == 0:
        raise InputError(f"expected at least one sample; got an empty batch of shape {tuple(first.shape)}")
    return int(first.shape[0])


def check_finite(batch: Batch, what: str = "inputs") -> None:
    """Raises an InputError if a floating-point tensor of the batch holds NaN or infinity. Waits for the device."""
    check_values(tensors(batch), what)


def pick_output(returned: Any, output: Pick = None) -> Tensor:
    """The output tensor of a model: what it returned, or the part that `output` names (key, index or function)."""
    if callable(output):
        try:
            returned = output(returned)
        except ExciteError:
            raise
        except Exception as error:
            raise InputError(f"output: the function raised {first_line(error)} on {_describe(returned)}") from error
    elif output is not None:
        if isinstance(returned, Tensor):
            raise InputError(
                f"output={shown(output)} picks a part of a tuple or a dict; the model returned a tensor: leave output out, or give a function"
            )
        try:
            if isinstance(output, str) and not isinstance(returned, Mapping):
                returned = getattr(returned, output)
            else:
                returned = returned[output]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"output={shown(output)} is not in what the model returned ({_describe(returned)})"
            ) from error
    if not isinstance(returned, Tensor):
        raise ModelError(
            f"the model returned {_describe(returned)}, not a tensor: say which part is the output, as in output='logits' or output=0"
        )
    return check_dense(returned, "outputs")


def _describe(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with keys {', '.join(map(repr, returned))}"
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {len(returned)}"
    return f"a {type(returned).__name__}"


# -- modules -----------------------------------------------------------------------------------------------------------
def check_model(model: object, name: str = "model") -> nn.Module:
    """A module. Reads none of its weights."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{name}: expected a torch.nn.Module; got {shown(model)}")
    return model


def check_placed(model: nn.Module) -> nn.Module:
    """The module, if all its parameters have values and can have gradients. Reads none of them."""
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {path!r} is not initialized yet: run the model once on a batch first")
        if parameter.device.type == "meta":
            raise ModelError(f"expected weights with values; {path} is on the meta device: load the weights first")
        if parameter.is_inference():
            raise ModelError(
                f"{path} was made under torch.inference_mode, so that no gradient can be computed: make the model outside of it"
            )
    return model


def all_finite(tensor: Tensor) -> Tensor:
    """Whether all entries are finite, on the device of the tensor; also for numbers of eight bits, which torch cannot ask."""
    small = tensor.is_floating_point() and tensor.element_size() == 1
    return torch.isfinite(tensor.detach().float() if small else tensor.detach()).all()


def check_weights(model: nn.Module) -> nn.Module:
    """The module, if all its parameters have finite values; the first that has not is named. Waits for the device once.

    Buffers may hold infinities: masks of attention do.
    """
    named = list(check_placed(check_model(model)).named_parameters())
    # Of weights that FSDP2 shards each process has a part: one that refuses alone would leave the others waiting.
    named = [
        (path, p)
        for path, p in named
        if p.is_floating_point() and p.layout is torch.strided and not hasattr(p, "to_local")
    ]
    if not named:
        return model
    device = named[0][1].device
    with torch.no_grad():
        good = torch.stack([all_finite(p).to(device) for _, p in named]).tolist()
    for (path, _), fine in zip(named, good):
        if not fine:
            raise ModelError(
                f"expected finite weights; {path} has NaN or infinite values: load a checkpoint from before training diverged"
            )
    return model


def check_norms(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights without elements, and those whose squares overflow float64. Waits for the device."""
    for name, weight in named:
        if not weight.numel():
            raise ModelError(f"expected weights with at least one element; {name} has the shape {tuple(weight.shape)}")
        if hasattr(weight, "to_local") or not weight.is_floating_point():
            continue
        if not math.isfinite(float(weight.detach().double().square().sum())):
            raise ModelError(
                f"expected weights whose squares are finite in float64; those of {name} are not: scale them"
            )


def check_output(output: Tensor) -> Tensor:
    """The output of a model, if it is finite. Waits for the device."""
    if output.is_floating_point() and not bool(torch.isfinite(output).all()):
        raise ModelError("expected finite outputs; the model returns NaN or infinite values at some of the inputs")
    return output


def check_real(output: Tensor) -> Tensor:
    """The output of a model, if it is not complex. Reads no value."""
    if output.is_complex():
        raise ModelError(
            f"expected outputs of real numbers; got {output.dtype}: return their real part or absolute value"
        )
    return output


def raised_in_module(error: BaseException) -> bool:
    """Whether a module was running when the error was raised."""
    code = nn.Module._call_impl.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def model_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function that runs the user's model.

    What the model raises becomes a `ModelError` in one line, with the original error as its cause. Running out of GPU memory
    stays as it is, for callers that then take smaller batches.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ExciteError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not raised_in_module(error):
                raise
            raise ModelError(
                f"the model raised {first_line(error)}: check that it takes inputs of this shape, dtype and device"
            ) from error

    return wrapped


# -- norms -------------------------------------------------------------------------------------------------------------
Norm = Literal["inf", "2", "1"]
_NAMES: dict[object, Norm] = {
    "inf": "inf", "Inf": "inf", "linf": "inf", math.inf: "inf",
    "2": "2", "l2": "2", 2: "2",
    "1": "1", "l1": "1", 1: "1",
}  # fmt: skip
DUAL: dict[Norm, Norm] = {"inf": "1", "2": "2", "1": "inf"}


def parse_norm(norm: object, allowed: tuple[Norm, ...] = ("inf", "2", "1")) -> Norm:
    """Returns "inf", "2" or "1" from a name or a number; anything else is refused."""
    try:
        name = None if isinstance(norm, bool) else _NAMES.get(norm)
    except TypeError:
        name = None
    if name is None or name not in allowed:
        raise InputError(f"unknown norm {norm!r}: expected one of {', '.join(repr(a) for a in allowed)}")
    return name


# -- packages ----------------------------------------------------------------------------------------------------------
class MissingPackage(ExciteError, ImportError):
    """A package that this integration needs is not installed."""


def need(module: str, extra: str) -> Any:
    """The module, or one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise MissingPackage(f"{package} does not import: {error}") from error
        raise MissingPackage(f"{package} is not installed: pip install 'excite[{extra}]'") from error
