"""What vital signs and the flight recorder add to the training of GPT-2 small.

    python -m benchmarks.vital_signs [--device cuda] [--size small] [--batch 16] [--rounds 5] [--seconds 90]

A GPT with the sizes of GPT-2 small (124 million weights, 1,024 tokens), bfloat16 autocast, `torch.compile`, fused AdamW, on random
tokens. With `--regional` every block and the output layer are compiled by themselves, which takes less time. Three models train in turns:
one that nobody watches, one with all vital signs, and one with these and the recorder. Signs are measured every 50 and every 10 steps, and
never. A round has 50 steps of each variant, one after the other; the extra time is the mean over rounds of the ratio within a round, with its
smallest and largest value. With signs every 50 steps, ranks of tokens and critical sharpness fall into one round in five each: take a multiple
of five rounds. `--alone` leaves out the variants with both recorder and signs. Printed are milliseconds per step, the extra time and the peak
memory, for every probe the milliseconds of one measurement on the host and on the GPU, between events, and with `--kernels` the number of its
kernels and for how long they keep the GPU busy. On a CPU `--size tiny` runs in seconds.

    python -m benchmarks.vital_signs --memory --device cuda --size billion --batch 4

prints the peak memory of a training without a watch, and with the probes that `excite.watch` chooses by default, all measured.

    python -m benchmarks.vital_signs --host --size narrow

prints what one measurement of each probe asks of the host: the operators it dispatches, views included, calls of functions in Python, and
milliseconds of CPU time. The layers and heads are those of GPT-2 small, and so narrow that the arithmetic hardly counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import excite
from benchmarks.timing import machine
from excite.probes import Every, FlightRecorder, Loss, Schedule, vital_signs

SIZES = {  # tokens, length, layers, heads, width
    "small": (50257, 1024, 12, 12, 768),
    "billion": (50257, 1024, 20, 16, 2048),
    "tiny": (101, 32, 2, 2, 32),
    "narrow": (64, 8, 12, 12, 24),
}
NEVER = 10**9


def allocated(device: torch.device, peak: bool = False) -> float:
    """GiB that are allocated on a GPU; NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**30


class Attention(nn.Module):
    """Causal attention by the fused kernel."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last normalization and the output layer, whose weight is that of the embedding."""

    def __init__(self, width: int):
        super().__init__()
        self.ln_f = nn.LayerNorm(width)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self.ln_f(x), weight)


class GPT(nn.Module):
    """GPT-2 with tied embeddings; returns logits."""

    def __init__(self, vocabulary: int, length: int, layers: int, heads: int, width: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(width)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(x, self.wte.weight)
        return logits


@dataclass
class Shifted:
    """A schedule whose steps are counted from another one."""

    schedule: Schedule
    by: int

    def due(self, step: int) -> bool:
        return step > self.by and self.schedule.due(step - self.by)


class Training:
    """One model with its optimizer; `run(steps)` trains and returns seconds per step and the peak memory."""

    def __init__(
        self,
        size: str,
        batch: int,
        device: torch.device,
        backend: str,
        watched: bool,
        regional: bool = False,
        recorder: bool = True,
    ):
        torch.manual_seed(0)
        sizes = SIZES[size]
        self.device = device
        self.model = GPT(*sizes).to(device)
        if regional:
            for part in (*self.model.h, self.model.head):
                part.compile(backend=backend)
        self.compiled = self.model if regional else torch.compile(self.model, backend=backend)
        self.ids = torch.randint(sizes[0], (4, batch, sizes[1] + 1), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.signs = vital_signs(1)
        self.watch, self.held = None, 0.0
        if watched:
            before = allocated(device)
            probes = [Loss(), *self.signs, *([FlightRecorder()] if recorder else [])]
            for probe in self.signs:
                probe.schedule = Every(NEVER)
            with torch.autocast(device.type, torch.bfloat16):
                self.watch = excite.watch(
                    self.compiled, self.ids[0, :, :-1], optimizer=self.optimizer, probes=probes, strict=True
                )
            self.held = allocated(device) - before

    def schedule(self, every: int, done: int = 0) -> None:
        """Measures signs as `vital_signs(every)` does, as if `done` steps had been trained that way."""
        if self.watch is not None:
            for probe, other in zip(self.signs, vital_signs(min(every, NEVER // 5))):
                probe.schedule = Shifted(other.schedule, self.watch.steps - done)

    def measure_at_every_step(self) -> None:
        for probe in self.signs:
            probe.schedule = Every(1)

    def step(self, i: int) -> None:
        ids = self.ids[i % len(self.ids)]
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.compiled(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        if self.watch is not None:
            with torch.autocast(self.device.type, torch.bfloat16):
                self.watch.step(loss)

    def run(self, steps: int) -> tuple[float, float]:
        self.settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for i in range(steps):
            self.step(i)
        self.settle()
        return (time.perf_counter() - began) / steps, allocated(self.device, peak=True)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Stopwatch:
    """Milliseconds of one measurement of each probe, on the host and, by events, on the GPU."""

    def __init__(self, training: Training):
        self._cuda = training.device.type == "cuda"
        self._host: dict[str, list[float]] = {}
        self._events: dict[str, list[tuple[Any, Any]]] = {}
        assert training.watch is not None
        for probe in training.watch.probes:
            for part in ("measure", "_before_step"):
                if hasattr(probe, part):
                    setattr(probe, part, self._timed(getattr(probe, part), f"{probe.name}.{part.strip('_')}"))

    def _timed(self, function: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if self._cuda else ()
            began = time.perf_counter()
            if events:
                events[0].record()
            result = function(*args)
            if events:
                events[1].record()
                self._events.setdefault(name, []).append(events)
            self._host.setdefault(name, []).append(1000 * (time.perf_counter() - began))
            return result

        return call

    def table(self) -> dict[str, dict[str, float]]:
        """Medians by probe; of the GPU NaN without one."""
        device = {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in self._events.items()}
        return {
            name: {"host": median(times), "gpu": median(device.get(name, [float("nan")]))}
            for name, times in self._host.items()
        }


def kernels(training: Training) -> dict[str, tuple[int, float]]:
    """Number of kernels (on a CPU: of operators) of one measurement of each probe, and the milliseconds they run."""
    found: dict[str, tuple[int, float]] = {}
    cuda = training.device.type == "cuda"

    def profiled(function: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            training.settle()
            with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
                result = function(*args)
                training.settle()
            events = profiler.key_averages()
            times = [one.self_device_time_total if cuda else one.self_cpu_time_total for one in events]
            if sum(times):
                counted = [one.count for one, spent in zip(events, times) if spent]
                found[name] = sum(counted), sum(times) / 1000
            return result

        return call

    for probe in training.signs:
        setattr(probe, "measure", profiled(probe.measure, probe.name))  # noqa: B010
    training.measure_at_every_step()
    training.run(2)
    return found


class CountOperators(TorchDispatchMode):
    """Counts the operators that are dispatched while it is active, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_work(size: str, batch: int, repeats: int = 60) -> dict[str, tuple[int, int, float]]:
    """By probe, of one measurement: operators it dispatches, calls of functions in Python, CPU time in milliseconds (the smallest).

    On the CPU, not compiled. What the optimizer's hooks do before a step that is measured counts as well.
    """
    training = Training(size, batch, torch.device("cpu"), "eager", watched=False)
    training.compiled = training.model
    counts: dict[str, Counter[str]] = {"operators": Counter(), "calls": Counter()}
    times: dict[tuple[str, str], float] = {}
    what = "operators"

    def observed(function: Any, name: str, part: str) -> Any:
        def call(*args: Any) -> Any:
            began = time.process_time()
            if what == "operators":
                with CountOperators() as operators:
                    result = function(*args)
                counts[what][name] += operators.count
            elif what == "calls":
                with profiled_calls() as calls:
                    result = function(*args)
                counts[what][name] += calls["call"] + calls["c_call"]
            else:
                result = function(*args)
                spent = 1000 * (time.process_time() - began)
                times[name, part] = min(spent, times.get((name, part), spent))
            return result

        return call

    for probe in training.signs:
        probe.schedule = Every(1)
        owner: Any = getattr(probe, "_before", probe)  # UpdateRatio and CriticalSharpness copy the weights
        for holder, part in ((probe, "measure"), (owner, "_before_step")):
            if hasattr(holder, part):
                setattr(holder, part, observed(getattr(holder, part), probe.name, part))
    with torch.autocast("cpu", torch.bfloat16):
        probes = [Loss(), *training.signs]
        training.watch = excite.watch(
            training.model, training.ids[0, :, :-1], optimizer=training.optimizer, probes=probes
        )
    training.run(3)
    for what in ("operators", "calls"):
        counts[what].clear()
        training.run(1)
    what = "time"
    training.run(repeats)
    training.watch.close()
    return {
        name: (count, counts["calls"][name], sum(spent for (other, _), spent in times.items() if other == name))
        for name, count in counts["operators"].items()
    }


@contextmanager
def profiled_calls() -> Iterator[Counter[str]]:
    """Counts the events of `sys.setprofile`."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: counts.update((event,)))
    try:
        yield counts
    finally:
        sys.setprofile(None)


VARIANTS = (  # name, whether with the recorder, steps between measurements
    ("recorder", True, NEVER),
    ("signs every 50", False, 50),
    ("signs every 10", False, 10),
    ("recorder, signs every 50", True, 50),
    ("recorder, signs every 10", True, 10),
)


def measure(
    size: str,
    batch: int,
    device: torch.device,
    backend: str,
    regional: bool,
    rounds: int,
    seconds: float,
    note: Any = print,
    alone: bool = False,
    count_kernels: bool = False,
) -> dict[str, Any]:
    """Milliseconds per step and peak memory of every variant, in turns; all models are held all the time."""
    variants = [one for one in VARIANTS if not (alone and one[1] and one[2] != NEVER)]
    began = time.perf_counter()
    plain = Training(size, batch, device, backend, False, regional)
    # Before the first compiled call:
    watched = {with_it: Training(size, batch, device, backend, True, regional, with_it) for with_it in (False, True)}
    for name, one in (("not watched", plain), ("signs", watched[False]), ("signs and recorder", watched[True])):
        one.run(5)
        print(f"{name}: compiled after {time.perf_counter() - began:.0f} s", flush=True)
    model = sum(p.numel() * p.element_size() for p in plain.model.parameters()) / 2**30
    for one in watched.values():  # choose kernels
        one.measure_at_every_step()
        one.run(4)
    plain.run(10)
    steps = 50 if device.type == "cuda" else 10
    found: dict[str, list[tuple[float, float]]] = {}
    held = {str(with_it): one.held for with_it, one in watched.items()}
    result: dict[str, Any] = {"gib_held": held, "gib_of_a_training": 3 * model}
    for i in range(rounds):
        if i and time.perf_counter() - began > seconds * (i + 1) / (i + 2):
            break
        found.setdefault("not watched", []).append(plain.run(steps))
        for name, recorder, every in variants:
            every = every if device.type == "cuda" or every == NEVER else every // 5
            watched[recorder].schedule(every, i * steps)
            found.setdefault(name, []).append(watched[recorder].run(steps))
        result["milliseconds"] = {name: [1000 * one[0] for one in rows] for name, rows in found.items()}
        result["gib"] = {name: max(one[1] for one in rows) for name, rows in found.items()}
        note(result)
    stopwatch = Stopwatch(watched[True])
    watched[True].schedule(10)
    watched[True].run(steps)
    result["probes"] = stopwatch.table()
    note(result)
    if count_kernels:
        result["kernels"] = kernels(watched[False])
        note(result)
    return result


def extra(result: dict[str, Any], name: str) -> str:
    """Extra time of a variant: mean of the ratios within rounds, with the smallest and the largest."""
    ratios = [a / b - 1 for a, b in zip(result["milliseconds"][name], result["milliseconds"]["not watched"])]
    return f"{mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"


class MemoryMeter:
    """GiB that each probe allocates at most while it measures, beyond what is allocated before."""

    def __init__(self, training: Training):
        self.peaks: dict[str, float] = {}
        assert training.watch is not None
        for probe in training.watch.probes:
            setattr(probe, "measure", self._measured(probe.measure, probe.name))  # noqa: B010

    def _measured(self, function: Any, name: str) -> Any:
        def call(ctx: Any) -> Any:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = function(ctx)
            torch.cuda.synchronize()
            used = (torch.cuda.max_memory_allocated() - before) / 2**30
            self.peaks[name] = max(used, self.peaks.get(name, 0.0))
            return result

        return call


def memory(size: str, batch: int, device: torch.device, steps: int = 4) -> dict[str, Any]:
    """GiB at the peak of a training that is not watched and of one with the default probes; not compiled.

    Also what the watch holds between steps, and what each probe takes while it measures.
    """
    found: dict[str, Any] = {}
    plain = 0.0
    for name in ("not watched", "default probes"):
        training = Training(size, batch, device, "eager", watched=False)
        training.compiled = training.model
        if name != "not watched":
            with torch.autocast(device.type, torch.bfloat16):
                training.watch = excite.watch(
                    training.model, training.ids[0, :, :-1], optimizer=training.optimizer, every=2
                )
        training.run(2)
        found[name] = training.run(steps)[1]
        if training.watch is None:
            plain = allocated(device)
        else:
            found["held between steps"] = allocated(device) - plain
            if device.type == "cuda":
                meter = MemoryMeter(training)
                training.run(2)
                found["while measuring"] = meter.peaks
            found["probes"] = [probe.name for probe in training.watch.probes]
            training.watch.close()
        found["weights"] = sum(p.numel() * p.element_size() for p in training.model.parameters()) / 2**30
        del training
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def print_host_work(work: dict[str, tuple[int, int, float]]) -> None:
    """A table by probe, and the sum over 50 steps of `vital_signs(10)`."""
    schedules = {probe.name: probe.schedule for probe in vital_signs(10)}
    print("| one measurement | operators | calls in Python | CPU time, ms |\n| --- | --: | --: | --: |")
    total = [0.0, 0.0, 0.0]
    for name, row in work.items():
        print(f"| {name} | {row[0]} | {row[1]} | {row[2]:.2f} |")
        due = sum(schedules[name].due(step) for step in range(1, 51))
        total = [one + due * more for one, more in zip(total, row)]
    print(f"| in 50 steps, measured every 10 | {total[0]:.0f} | {total[1]:.0f} | {total[2]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600, help="no further round after about so many seconds")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument(
        "--regional", action="store_true", help="compile each block and the output, not the whole model"
    )
    parser.add_argument("--alone", action="store_true", help="recorder and signs by themselves, not together")
    parser.add_argument("--kernels", action="store_true", help="count the kernels of every probe, by the profiler")
    parser.add_argument("--memory", action="store_true", help="only the peak memory with the default probes")
    parser.add_argument("--host", action="store_true", help="only operators and CPU time of every probe")
    parser.add_argument("--json", help="file that the numbers are written to after every round")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # the two models differ by hooks

    def note(result: dict[str, Any]) -> None:
        if options.json:
            Path(options.json).write_text(json.dumps(result))

    if options.memory:
        sizes = memory(options.size, options.batch, torch.device(options.device))
        print(json.dumps(sizes))
        note(sizes)
        return
    if options.host:
        torch.set_num_threads(1)
        print_host_work(host_work(options.size, options.batch))
        return
    result = measure(
        options.size,
        options.batch,
        torch.device(options.device),
        options.backend,
        options.regional,
        options.rounds,
        options.seconds,
        note,
        options.alone,
        options.kernels,
    )
    print(json.dumps(result))
    rounds = len(result["milliseconds"]["not watched"])
    print(f"\n{machine()}, {options.size}, batch {options.batch}, {rounds} rounds\n")
    print("| | ms per step | more | peak memory |\n| --- | --: | --: | --: |")
    held, other = result["gib_held"], 2 * result["gib_of_a_training"]  # of each of the two others
    alone = result["gib"]["not watched"] - other - sum(held.values())
    for name, times in result["milliseconds"].items():
        plain = name == "not watched"
        with_it = str(name.startswith("recorder"))
        own = alone if plain else result["gib"][name] - other - held["False" if with_it == "True" else "True"]
        more = "" if plain else extra(result, name)
        grown = "" if plain else f" ({own / alone - 1:+.1%})"
        print(f"| {name} | {mean(times):.2f} | {more} | {own:.2f} GiB{grown} |")
    print("\n| one measurement | ms on the host | ms on the GPU |\n| --- | --: | --: |")
    for name, times in result["probes"].items():
        print(f"| {name} | {times['host']:.2f} | {times['gpu']:.2f} |")
    for name, (count, busy) in result.get("kernels", {}).items():
        print(f"{name}: {count} kernels, {busy:.2f} ms")


if __name__ == "__main__":
    main()
