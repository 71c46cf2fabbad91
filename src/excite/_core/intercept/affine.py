"""Every affine call of a model while it runs, and what goes into it.

A `TorchFunctionMode` intercepts every call, wherever it is made: a module, a bare functional call, an attention layer. Module
hooks would miss the last two. During a pass it follows which tensors are computed from parameters and constants alone.
A product of such a tensor with one that depends on the data is an affine call, however the weight came about: scaled,
cast, transposed, normalized, parametrized, a sum of factors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from excite._core.intercept.affine_call import (
    OUT_OF_PLACE,
    PRODUCTS,
    AffineCall,
    At,
    InputStep,
    Product,
    argument,
    find,
    weighted_terms,
)
from excite._core.intercept.functions import (
    DIVISIONS,
    FACTORIES,
    FILLED,
    IN_PLACE,
    LAYERS,
    LIKE,
    MOVING,
    OPAQUE,
    OPENED,
    RANDOM,
    REARRANGING,
    REPEATING,
    SCALINGS_IN_PLACE,
    SHALLOW,
    SUMS,
    UNEQUAL,
    methods,
)
from excite._core.intercept.names import Names, Sources, clean_path, layer_name
from excite._core.intercept.parameters import Roles
from excite._core.intercept.traces import (
    DivisionByWeight,
    MixedSignal,
    SignalTrace,
    WeightedSum,
    input_step,
    rounded,
    version,
)

__all__ = ["AffineCall", "AffineMode", "Names", "clean_path", "layer_name"]

_TENSORS = (Tensor, tuple, list)


def _transform_level() -> int:
    """How many transforms of torch.func are active."""
    innermost = peek_interpreter_stack()
    return 0 if innermost is None else innermost.level()


class AffineMode(TorchFunctionMode):
    """While active, `visit(call)` replaces every affine call of `model`; it returns the output of the call.

    Subclasses override `visit`; `replacements` has what they compute instead of other functions, by function.
    One instance serves one forward pass: repeated calls of a weight are counted.
    With `roles` set to a `Roles`, the pass notes what every parameter does.
    """

    replacements: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {}

    def __init__(self, names: Names):
        super().__init__()
        self.names = names
        self.roles: Roles | None = None
        self._level = _transform_level()
        self._count: dict[str, int] = {}
        self._known = names.sources
        # By identity: what a tensor is computed from, None once data was written to it. No tensor is kept alive. The model may
        # keep a weight that it computed in the pass before.
        before = names.computed.items()
        self._static = names.computed = {
            k: entry for k, entry in before if entry[0] is not None and entry[1]() is not None
        }
        self._traces: dict[int, SignalTrace] = {}
        # What an initial state is made of: constants with equal entries, and parameters that were repeated.
        self._states: dict[int, weakref.ref[Tensor]] = {}
        self._mixed: dict[int, MixedSignal] = {}

    def visit(self, call: AffineCall) -> Tensor:
        return call.run(call.input)

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that is not an affine call."""
        replacement = self.replacements.get(func)
        return func(*args, **kwargs) if replacement is None else replacement(self, func, args, kwargs)

    def opaque(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called for recurrent kernels, whose inner affine maps cannot be reached."""
        return function(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if peek_interpreter_stack() is not None and _transform_level() > self._level:
            return self._transformed(func, args, kwargs or {})
        handler: Callable[..., Any] = _HANDLERS.get(func, AffineMode._plain)
        return handler(self, func, args, kwargs or {})

    # -- functions -----------------------------------------------------------------------------------------------
    def _plain(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.other(func, args, kwargs)
        first = args[0] if args else None
        if self._mixed and func in REARRANGING:
            mixed = self._mixed_of(first)
            self._keep_mixed(result, None if mixed is None else replace(mixed, varies=None))
        if (
            type(first) is Tensor
            and self.roles is None
            and id(first) not in self._static
            and id(first) not in self._known
        ):
            # A function of the data. If it moves copies, it belongs to the affine call that follows.
            if self._traces and func in MOVING and self._trace_of(first) is not None:
                self._keep_trace(func, args, kwargs, result)
            return result
        if result is None or isinstance(result, _TENSORS):  # not a shape, a device, a number
            self._follow(func, args, kwargs, result)
        return result

    def _transformed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside `torch.vmap`, `torch.func.grad` and their kin, whose tensors cannot be perturbed or kept."""
        if self.roles is not None:
            for tensor in _tensors((*args, *kwargs.values())):
                self.roles.transformed(self._sources(tensor) or ())
        return func(*args, **kwargs)

    def _hidden(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.opaque(func, args, kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _opened(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self:
            return OPENED[func](*args, **kwargs)

    def _layer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # F.linear and the convolutions share the first three arguments, by position or by name.
        tensors: list[Tensor | None] = []
        places: list[At] = []
        for position, key in enumerate(("input", "weight", "bias")):
            value = args[position] if position < len(args) else kwargs.get(key)
            tensors.append(value if isinstance(value, Tensor) else None)
            places.append((position,) if position < len(args) else (key,))
        input, weight, bias = tensors
        if input is None or weight is None:
            return self._plain(func, args, kwargs)
        input_at, weight_at, bias_at = places[0], places[1], places[2] if bias is not None else None
        # A weight that depends on the data makes an affine call of its input as well, but is no constant in a search.
        sources = self._factor(weight)
        fixed = [] if sources is None else [weight_at]
        mixed = self._mixed_of(weight) if sources is None else None
        if mixed is not None:
            sources = mixed.sources
        if bias_at is not None and self._factor(bias) is not None:
            fixed.append(bias_at)
        return self._visit(LAYERS[func], func, args, kwargs, (input_at, weight_at, bias_at), fixed, sources or ())

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            return self._written(func, args, kwargs)
        recognised = self._recognise(PRODUCTS[func], args, kwargs)
        if recognised is None:
            return self._plain(func, args, kwargs)
        result = self._visit("linear", func, args, kwargs, *recognised, PRODUCTS[func])
        places, _, sources = recognised
        state = self._sources(argument(args, kwargs, places[0]))
        if state is not None:  # computed without the data: it may turn out to be a weight
            paths = tuple(dict.fromkeys((*sources, *state)))
            self._keep_mixed(result, MixedSignal(weakref.ref(result), paths, True))
        return result

    def _written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product that is written into a tensor, as by `addmm_` and `out=`: computed out of place, then copied."""
        out_of_place = OUT_OF_PLACE.get(func, func)
        target = kwargs.get("out", args[0] if args else None)
        named = {key: value for key, value in kwargs.items() if key != "out"}
        recognised = self._recognise(PRODUCTS[out_of_place], args, named)
        if recognised is None or not isinstance(target, Tensor):
            return self._plain(func, args, kwargs)
        with torch.autocast(target.device.type, enabled=False):  # which leaves functions in place and with out= alone
            result = self._visit("linear", out_of_place, args, named, *recognised, PRODUCTS[out_of_place])
        if "out" in kwargs and target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
        if self._sources(target) is not None:
            self._spoil(target)
        return target

    def _recognise(
        self, product: Product, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[At, At, At | None], list[At], Sources] | None:
        """Where input, weight and bias of an affine call stand, what does not depend on the data, and the parameters of the weight.

        None if it is no affine call.
        """
        places = product.factors(args, kwargs)
        if places is None:
            return None
        factors = {at: argument(args, kwargs, at) for at in places}
        sources_at = {at: self._factor(factor) for at, factor in factors.items()}
        signals = [at for at in places if sources_at[at] is None]
        if not signals:
            signals = [at for at in places if self._is_state(factors[at])]
            signals = [at for at in signals if not sources_at[at]] or signals  # zeros rather than a repeated weight
        mixed_factors = {at: self._mixed_of(factors[at]) for at in signals} if self._mixed and len(signals) == 2 else {}
        mixed = [at for at, mixed_signal in mixed_factors.items() if mixed_signal is not None]
        if len(mixed) == 1 and len(places) == 2:
            mixed_factor, at = mixed_factors[mixed[0]], places.index(mixed[0])
            terms = product.terms(list(factors.values()), args, kwargs)
            if mixed_factor is None or (
                terms is not None and not mixed_factor.weighs(terms[0][at], terms[0][1 - at], terms[1])
            ):
                pass
            elif mixed_factor.full:
                signals.remove(mixed[0])
                sources_at[mixed[0]] = mixed_factor.sources
            elif self.roles is not None:
                self.roles.multiplied(mixed_factor.sources)
        weights = [at for at in places if sources_at[at] and at not in signals]
        if len(signals) != 1 or not weights:
            return None
        fixed = [at for at in places if at not in signals and at not in mixed]
        bias_at = product.added(args, kwargs)
        added = None if bias_at is None else argument(args, kwargs, bias_at)
        if added is not None and self._is_signal(added):
            bias_at = None  # such as a skip connection, zeros that the product is added to in place, or a repeated bias
            if self.roles is not None:
                self.roles.meets("add", self._factor(added) or (), (), None)
        if bias_at is not None:
            fixed.append(bias_at)
        sources = tuple(dict.fromkeys(path for at in weights for path in sources_at[at] or ()))
        return (signals[0], weights[0], bias_at), fixed, sources

    def _copy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that copies entries of its input: padding, unfolding."""
        result = self._plain(func, args, kwargs)
        self._keep_trace(func, args, kwargs, result)
        return result

    def _multiply(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._of_data(args):
            return self._plain(func, args, kwargs)
        first, second = find(args, kwargs, 0, "input"), find(args, kwargs, 1, "other")
        if first is None or second is None:
            return self._combine(func, args, kwargs)
        pairs = [(first, second), (second, first)]
        operands, divides = args, func in DIVISIONS
        if divides or func in SCALINGS_IN_PLACE:
            pairs = pairs[:1]
        pairs = [(at, other) for at, other in pairs if self._weighs(argument(args, kwargs, other))]
        if divides and kwargs.get("rounding_mode") is not None:
            pairs = []
        if pairs and func in SCALINGS_IN_PLACE and self._sources(args[0]) is None:
            operands = (args[0].clone(), *args[1:])  # the signal, before the product is written into it
        result = self._combine(func, args, kwargs)
        for at, other in pairs:
            signal, weight = argument(operands, kwargs, at), argument(operands, kwargs, other)
            multiply: Callable[..., Any] = torch.mul
            if divides:
                sources, multiply = self._sources(weight), DivisionByWeight(weight)
                weight = multiply.reciprocal
                self._set_sources(weight, sources or ())
            if torch.result_type(signal, weight) != result.dtype:  # in place, the type is that of the signal
                multiply = rounded(multiply, result.dtype)
            self._keep_trace(multiply, (signal, weight), {}, result, (0,), (1,))
        return result

    def _of_data(self, args: tuple[Any, ...]) -> bool:
        """Whether a sum or product is certainly one of signals and numbers, the most frequent case."""
        if self._mixed or len(args) != 2:
            return False
        static, known = self._static, self._known
        return all(
            type(operand) is float
            or (type(operand) is Tensor and id(operand) not in static and id(operand) not in known)
            for operand in args
        )

    def _weighs(self, factor: Tensor) -> bool:
        return factor.dim() > 0 and bool(self._sources(factor))

    def _combine(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A sum or product of two tensors: of a matrix of parameters and a signal it is a weight that is in part data."""
        result = self._plain(func, args, kwargs)
        if self._of_data(args):
            return result
        tensors = [tensor for tensor in (*args[:2], kwargs.get("other")) if isinstance(tensor, Tensor)]
        signals = [tensor for tensor in tensors if self._sources(tensor) is None]
        if signals and isinstance(result, Tensor) and result.dim() > 1:
            for tensor in tensors:
                mixed = self._sources(tensor) if len(signals) == 1 else None
                if mixed and tensor.dim() > 1 and min(tensor.shape[-2:]) > 1:
                    same_shape = tensor.shape == result.shape and len(tensor) > 1
                    varies = (*(False,) * (result.dim() - tensor.dim()), *(size > 1 for size in tensor.shape))
                    self._keep_mixed(result, MixedSignal(weakref.ref(result), mixed, same_shape, varies))
                elif self._mixed and (known := self._mixed_of(tensor)) is not None and tensor.shape == result.shape:
                    self._keep_mixed(result, known)
        return result

    def _total(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A sum or mean over an axis of x · w along which w changes is a product with w."""
        at = find(args, kwargs, 0, "input") if self._traces else None
        trace = None if at is None else self._traces.get(id(argument(args, kwargs, at)))
        if (
            at is None
            or trace is None
            or trace.weight_at is None
            or not trace.of(doubled := argument(args, kwargs, at))
        ):
            return self._plain(func, args, kwargs)
        dims = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        every = range(doubled.dim()) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
        summed = [dim % doubled.dim() for dim in every]
        weight = argument(trace.step.args, trace.step.kwargs, trace.weight_at)
        shape = (1,) * (doubled.dim() - weight.dim()) + tuple(weight.shape)
        if not any(shape[dim] > 1 for dim in summed):
            return self._plain(func, args, kwargs)
        remaining, named = (args[1:], kwargs) if at == (0,) else ((), {k: v for k, v in kwargs.items() if k != "input"})
        product = Product(
            lambda args, kwargs: [(0,), (1,)], lambda factors, args, kwargs: weighted_terms(factors, summed)
        )
        function, operands = WeightedSum(trace.step.function, func, remaining, named), (trace.signal, weight)
        return self._visit(
            "linear", function, operands, {}, ((0,), (1,), None), [(1,)], self._sources(weight) or (), product
        )

    def _like(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A constant of the type and device of another tensor."""
        result = self._plain(func, args, kwargs)
        name = func.__name__
        if isinstance(result, Tensor) and (name.startswith("new_") or self._sources(result) is None):
            self._set_sources(result, ())
            if name != "new_tensor":
                self._states[id(result)] = weakref.ref(result)
        return result

    def _attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mask of numbers is added to the scores: relative positions, ALiBi."""
        at = find(args, kwargs, 3, "attn_mask")
        if self.roles is not None and at is not None:
            self.roles.meets("add", self._sources(argument(args, kwargs, at)) or (), (), None)
        return self._plain(func, args, kwargs)

    def _require_grad(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x.requires_grad = True` on the model's input, which may be no leaf here but a copy of one."""
        if args[1] is True and args[0].requires_grad:
            return None
        return self.other(func, args, kwargs)

    def _iterate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        items = list(self.other(func, args, kwargs))
        self._follow(func, args, kwargs, items)
        return iter(items)

    def _visit(
        self,
        call_kind: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: tuple[At, At, At | None],
        fixed: Sequence[At],
        sources: Sources,
        product: Product | None = None,
    ) -> Tensor:
        name = self.names.of_one.get(sources) or self.names.layer(sources)
        self._count[name] = count = self._count.get(name, 0) + 1
        if count > 1:
            name = f"{name}#{count}"
        at = places[0]
        input = args[at[0]] if len(at) == 1 and isinstance(at[0], int) else argument(args, kwargs, at)
        input, before = self._signal(input) if self._traces else (input, ())
        call = AffineCall(name, call_kind, func, args, kwargs, *places, input, tuple(fixed), product, before)
        if self.roles is not None:
            self.roles.layer(name, sources, self._factor(call.bias) or (), self._factor(call.input) or ())
        return self.visit(call)

    # -- what tensors are computed from --------------------------------------------------------------------------
    def _sources(self, tensor: Tensor) -> Sources | None:
        """The parameters a tensor is computed from; None if it depends on the data."""
        key = id(tensor)
        entry = self._static.get(key)
        if entry is not None and entry[1]() is tensor:
            return entry[0]
        if key not in self._known and type(tensor) is nn.Parameter:
            self.names.update()
        return self._known.get(key)

    def _factor(self, tensor: Tensor | None) -> Sources | None:
        """The same for tensors that may have been made outside of the pass, as views of a parameter."""
        if tensor is None:
            return None
        sources = self._sources(tensor)
        if sources is None and id(tensor) not in self._static:
            path = self.names.parameter(tensor)
            sources = None if path is None else (path,)
        return sources

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        # Some take no more than type, device or shape from their further arguments.
        tensors = list(_tensors(args[:1] if func in SHALLOW else (*args, *kwargs.values())))
        name = getattr(func, "__name__", "")
        if not tensors:
            if name in FACTORIES:
                self._set_sources(result, ())
                if name in FILLED and isinstance(result, Tensor):
                    self._states[id(result)] = weakref.ref(result)
            return
        if self._traces and func in MOVING and self._trace_of(tensors[0]) is not None:
            self._keep_trace(func, args, kwargs, result)
        sources_of = [self._sources(tensor) for tensor in tensors]
        target = tensors[0] if _writes(name) else kwargs.get("out")
        if name in RANDOM:
            self._spoil(tensors[0])
            return
        if None not in sources_of:
            self._follow_state(name, tensors, result)
            sources = tuple(dict.fromkeys(path for paths in sources_of for path in paths or ()))
            self._set_sources(result if target is None else target, sources)
            return
        if isinstance(target, Tensor) and self._sources(target) is not None:
            self._spoil(target)
        if self.roles is not None:
            signals = [tensor for tensor, sources in zip(tensors, sources_of) if sources is None]
            for known in sources_of:
                if known:
                    self.roles.meets(name, known, signals, result)

    def _set_sources(self, result: Any, sources: Sources) -> None:
        for tensor in _tensors((result,)):
            if self._known.get(id(tensor)) != sources or id(tensor) in self._static:
                self._static[id(tensor)] = (sources, weakref.ref(tensor))

    def _follow_state(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        states = [self._is_state(tensor) for tensor in tensors]
        if _writes(name):
            if name not in ("zero_", "fill_"):
                self._states.pop(id(tensors[0]), None)
            return
        if any(states):
            is_state = name not in UNEQUAL and (all(states) or name.strip("_") in SUMS)
        else:
            is_state = name in REPEATING and bool(self._sources(tensors[0])) and result.numel() > tensors[0].numel()
        if is_state:
            self._states.update((id(tensor), weakref.ref(tensor)) for tensor in _tensors((result,)))

    def _is_signal(self, added: Tensor) -> bool:
        return self._factor(added) is None or (self._is_state(added) and added.shape[:-1].numel() > 1)

    def _is_state(self, tensor: Tensor) -> bool:
        entry = self._states.get(id(tensor))
        return entry is not None and entry() is tensor

    def _keep_mixed(self, result: Any, mixed: MixedSignal | None) -> None:
        if mixed is not None and isinstance(result, Tensor):
            self._mixed = {key: other for key, other in self._mixed.items() if other.result() is not None}
            self._mixed[id(result)] = replace(mixed, result=weakref.ref(result))

    def _mixed_of(self, tensor: Any) -> MixedSignal | None:
        entry = self._mixed.get(id(tensor))
        return entry if entry is not None and entry.result() is tensor else None

    def _spoil(self, target: Tensor) -> None:
        """Data was written into a tensor: everything that shares its memory depends on the data from now on."""
        memory = _memory(target)
        alive = [entry[1]() for entry in self._static.values()]
        for tensor in (target, *alive, *self.names.references):
            if tensor is not None and (tensor is target or (memory and _memory(tensor) == memory)):
                self._static[id(tensor)] = (None, weakref.ref(tensor))

    # -- signals that are copied on their way --------------------------------------------------------------------
    def _keep_trace(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        at: At | None = None,
        weight_at: At | None = None,
    ) -> None:
        at = at or find(args, kwargs, 0, "input")
        if at is None or not isinstance(result, Tensor):
            return
        signal = argument(args, kwargs, at)
        if result is signal or self._sources(signal) is not None:  # x.contiguous() may be x itself
            return
        self._traces = {key: trace for key, trace in self._traces.items() if trace.result() is not None}
        step = input_step(func, args, kwargs, at, result)
        versions = version(result), version(signal)
        self._traces[id(result)] = SignalTrace(weakref.ref(result), signal, versions, step, weight_at)

    def _trace_of(self, tensor: Tensor) -> SignalTrace | None:
        trace = self._traces.get(id(tensor))
        return trace if trace is not None and trace.weight_at is None and trace.of(tensor) else None

    def _signal(self, entering: Tensor) -> tuple[Tensor, tuple[InputStep, ...]]:
        """The signal that was copied into what enters a call, and the steps between."""
        signal = entering
        steps: list[InputStep] = []
        while (trace := self._trace_of(signal)) is not None:
            signal = trace.signal
            steps.insert(0, trace.step)
        return signal, tuple(steps)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name in IN_PLACE
    return name.endswith("_")


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return 0


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(OPENED, AffineMode._opened),
    **dict.fromkeys(LAYERS, AffineMode._layer),
    **dict.fromkeys(PRODUCTS, AffineMode._product),
    **dict.fromkeys(OPAQUE, AffineMode._hidden),
    **dict.fromkeys((F.pad, torch.constant_pad_nd, F.unfold, Tensor.unfold), AffineMode._copy),
    **dict.fromkeys(OUT_OF_PLACE, AffineMode._written),
    **dict.fromkeys(
        (*methods("add", "sub", "subtract", "add_", "sub_", "subtract_"), Tensor.__iadd__, Tensor.__isub__),
        AffineMode._combine,
    ),
    **dict.fromkeys((*methods("mul", "multiply"), *DIVISIONS, *SCALINGS_IN_PLACE), AffineMode._multiply),
    **dict.fromkeys(methods("sum", "mean"), AffineMode._total),
    **dict.fromkeys(LIKE, AffineMode._like),
    Tensor.__iter__: AffineMode._iterate,
    Tensor.requires_grad.__set__: AffineMode._require_grad,  # type: ignore[attr-defined]
    F.scaled_dot_product_attention: AffineMode._attention,
}
