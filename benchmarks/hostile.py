"""Calls of the public API in which something is wrong: each ends in an answer, or in one line that says what to do.

    python -m benchmarks.hostile [--calls 10000] [--seed 0] [--only NAME]

Every call is one of `CALLS` with valid arguments, of which one (in a fifth of the calls two) is replaced by a value from
`HOSTILE` (see `benchmarks.hostile_calls`). Counts as good: a finite answer, or an `ExciteError`, `TypeError` or `ValueError` that Excite itself raised, with a
message of one line; in the training step also what the user's own module raised. The model must be as before. Prints the
counts by outcome, and every kind of bad outcome with a call that leads to it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import excite
from benchmarks.hostile_calls import CALLS, HOSTILE, Call, descent_of, network
from excite.errors import ExciteError

LIMIT = 20  # seconds that one call may take
GOOD = ("answer", "refused", "the model's own error")
SOURCE = str(Path(excite.__file__).parent)


class Hang(BaseException):
    """A call took longer than LIMIT seconds."""


# -- outcomes ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What one call led to; `what` names the call, its replaced arguments and the error."""

    name: str
    result: str
    what: str

    @property
    def good(self) -> bool:
        return self.result in GOOD


def _fingerprint(model: Any, trains: bool) -> Any:
    """What must not change, NaN included."""
    if not isinstance(model, nn.Module):
        return None
    modules = list(model.modules())
    shape = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), sorted(vars(m)))
        for m in modules
    ]
    random_state = torch.get_rng_state().numpy().tobytes()
    if trains:
        return shape
    tensors = [
        t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, nn.parameter.UninitializedParameter)
    ]
    values = [
        t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        if t.device.type == "cpu" and t.dim() and t.numel()
        else t.device.type == "cpu" and t.dim() == 0 and str(t.item())
        for t in tensors
    ]
    return shape, values, [p.grad is None for p in model.parameters()], random_state


def numbers(found: Any, depth: int = 0) -> Iterator[float]:
    """The numbers of an answer; none of one that says itself that its assumptions do not hold."""
    if getattr(found, "holds", None) is False:
        return
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.device.type == "cpu":
            yield from found.detach().double().reshape(-1).tolist()
    elif isinstance(found, float):
        yield found
    elif depth < 4 and isinstance(found, tuple | list):
        for part in found:
            yield from numbers(part, depth + 1)
    elif depth < 4 and isinstance(found, dict):
        for part in found.values():
            yield from numbers(part, depth + 1)
    elif depth < 4 and dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            yield from numbers(getattr(found, field.name, None), depth + 1)


def _of_the_model(error: BaseException) -> bool:
    """Whether the user's module or function raised it: torch was asked to do something by the module's forward."""
    return any(frame.name in ("_call_impl", "_raise") for frame in traceback.extract_tb(error.__traceback__))


def _judge(error: BaseException, trains: bool) -> str:
    ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(SOURCE)
    if isinstance(error, ExciteError) or (isinstance(error, TypeError | ValueError) and ours):
        return "refused" if "\n" not in str(error) and str(error) else "several lines"
    if isinstance(error, TypeError) and "unexpected keyword" in str(error):
        return "refused"
    if trains and _of_the_model(error):
        return "the model's own error"
    return "raw error"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _valid(call: Call) -> dict[str, Any]:
    return {key: make() for key, (_, make) in call.arguments.items()}


def _with_optimizer(arguments: dict[str, Any]) -> dict[str, Any]:
    """The valid optimizer is one of the model, where that has parameters."""
    if arguments.get("optimizer") is not descent_of:
        return arguments
    model = arguments["model"]
    fit = isinstance(model, nn.Module) and any(True for _ in model.parameters())
    return {**arguments, "optimizer": descent_of(model if fit else network())}


def valid_call(name: str, seed: int = 0) -> Any:
    """The answer to valid arguments."""
    torch.manual_seed(seed)
    return CALLS[name].function(**_with_optimizer(_valid(CALLS[name])))


def hostile_call(name: str, number: int, seed: int) -> Outcome:
    """The call `number` of `name`: which arguments are replaced, and by what, follows from number and seed alone."""
    call, rng = CALLS[name], random.Random(f"{name} {number} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    arguments = _valid(call)
    slots = [(key, i) for key, (role, _) in call.arguments.items() for i in range(len(HOSTILE[role]))]
    replaced = {}
    for key, i in rng.sample(slots, 2 if rng.random() < 0.2 else 1):
        arguments[key] = replaced[key] = HOSTILE[call.arguments[key][0]][i]()
    arguments = _with_optimizer(arguments)
    shown = ", ".join(f"{key}={_short(value)}" for key, value in replaced.items())
    model = arguments.get("model", arguments.get("what"))
    before = _fingerprint(model, call.trains)
    try:
        with _limited(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            found = call.function(**arguments)
        result = "silent NaN" if not call.trains and any(math.isnan(v) for v in numbers(found)) else "answer"
        why = ""
    except Hang:
        result, why = "hang", f"longer than {LIMIT} s"
    except Exception as raised:
        result, why = _judge(raised, call.trains), f"{type(raised).__name__}: {str(raised)[:120]!r}"
        if result == "raw error":
            last = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename.startswith(SOURCE)][-1:]
            why += "".join(f" at {Path(f.filename).relative_to(SOURCE)}:{f.lineno}" for f in last)
    if before != _fingerprint(model, call.trains):
        result = "changed the model"
    return Outcome(name, result, f"{name}({shown}) {why}")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = "sparse " if value.layout is not torch.strided else ""
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"{kind}{value.dtype} {shape} {value.device.type}"
    try:
        return " ".join(repr(value).split())[:60]
    except Exception:  # of a dataset without points
        return type(value).__name__


def outcomes(calls: int, seed: int = 0, only: str = "") -> Iterator[Outcome]:
    """`calls` hostile calls, in turn of each function."""
    names = [name for name in CALLS if only in name]
    for number in range(calls):
        yield hostile_call(names[number % len(names)], number // len(names), seed)


def limit_memory(more: int = 4 * 2**30) -> None:
    """Let a call that asks for this much more memory fail, instead of the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="functions whose name contains this")
    options = parser.parse_args()
    limit_memory()
    began, done = time.monotonic(), list(outcomes(options.calls, options.seed, options.only))
    counts = Counter(one.result for one in done)
    print("| outcome | calls |\n| --- | --- |")
    for result, count in counts.most_common():
        print(f"| {result} | {count:,} |")
    print(f"\n{len(done):,} calls of {len({one.name for one in done})} functions in {time.monotonic() - began:.0f} s")
    bad = [one for one in done if not one.good]
    for one in bad:
        print(f"{one.result}: {one.what}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
