"""What vital signs and the flight recorder add to the training of GPT-2 small.

    python -m benchmarks.vital_signs [--device cuda] [--size small] [--batch 16] [--rounds 2]

A GPT with the sizes of GPT-2 small (124 million weights, 1,024 tokens), bfloat16 autocast, `torch.compile`, fused AdamW, on random
tokens. Two models train in turns: one that nobody watches, and one with all vital signs and the recorder attached, whose signs are
measured never, every 50 and every 10 steps. Printed are milliseconds per step and the peak memory, with the difference to the first.
On a CPU `--size tiny` runs in seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from benchmarks.timing import machine
from excite.probes import Every, FlightRecorder, Loss, vital_signs

SIZES = {"small": (50257, 1024, 12, 12, 768), "tiny": (101, 32, 2, 2, 32)}  # tokens, length, layers, heads, width
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


class GPT(nn.Module):
    """GPT-2 with tied embeddings; returns logits."""

    def __init__(self, vocabulary: int, length: int, layers: int, heads: int, width: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class Training:
    """One model with its optimizer; `run(steps)` trains and returns seconds per step and the peak memory."""

    def __init__(self, size: str, batch: int, device: torch.device, backend: str, watched: bool):
        torch.manual_seed(0)
        sizes = SIZES[size]
        self.device = device
        self.model = GPT(*sizes).to(device)
        self.compiled = torch.compile(self.model, backend=backend)
        self.ids = torch.randint(sizes[0], (4, batch, sizes[1] + 1), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.signs = vital_signs(1)
        self.watch, self.held = None, 0.0
        if watched:
            before = allocated(device)
            probes = [Loss(), *self.signs, FlightRecorder()]
            for probe in self.signs:
                probe.schedule = Every(NEVER)
            with torch.autocast(device.type, torch.bfloat16):
                self.watch = excite.watch(
                    self.compiled, self.ids[0, :, :-1], optimizer=self.optimizer, probes=probes, strict=True
                )
            self.held = allocated(device) - before

    def schedule(self, every: int) -> None:
        """Measures signs every so many steps; ranks of tokens and critical sharpness five times as rarely."""
        for probe in self.signs:
            apart = probe.name in ("token_rank", "sharpness") and every < NEVER
            probe.schedule = Every(5 * every if apart else every)

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


def measure(size: str, batch: int, device: torch.device, backend: str, rounds: int) -> dict[str, Any]:
    """Milliseconds per step and peak memory of every variant, in turns; both models are held all the time."""
    found: dict[str, list[tuple[float, float]]] = {}
    began = time.perf_counter()
    plain = Training(size, batch, device, backend, watched=False)
    watched = Training(size, batch, device, backend, watched=True)  # before the first compiled call
    for name, one in (("not watched", plain), ("watched", watched)):
        one.run(10)
        print(f"{name}: compiled after {time.perf_counter() - began:.0f} s", flush=True)
    other = 3 * sum(p.numel() * p.element_size() for p in watched.model.parameters()) / 2**30
    long = 250 if device.type == "cuda" else 50
    watched.schedule(10)
    watched.run(60)  # choose kernels
    for _ in range(rounds):
        found.setdefault("not watched", []).append(plain.run(100))
        for name, every, steps in (
            ("recorder", NEVER, 100),
            ("recorder, signs every 50", 50, long),
            ("recorder, signs every 10", 10, 100),
        ):
            watched.schedule(every)
            found.setdefault(name, []).append(watched.run(steps))
        print(
            {name: [f"{1000 * one[0]:.2f}" for one in rows] for name, rows in found.items()},
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return {"milliseconds": {name: [1000 * one[0] for one in rows] for name, rows in found.items()},
            "gib": {name: max(one[1] for one in rows) for name, rows in found.items()}, "gib_held_by_the_watch": watched.held, "gib_of_the_other_model": other}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # the two models differ by hooks
    device = torch.device(options.device)
    result = measure(options.size, options.batch, device, options.backend, options.rounds)
    print(json.dumps(result))
    print(
        f"\n{machine()}, {options.size}, batch {options.batch}\n\n| | ms per step | more | peak memory |\n| --- | --: | --: | --: |"
    )
    first = min(result["milliseconds"]["not watched"])
    held, other = result["gib_held_by_the_watch"], result["gib_of_the_other_model"]
    alone = result["gib"]["not watched"] - other - held
    for name, times in result["milliseconds"].items():
        own = alone if name == "not watched" else result["gib"][name] - other
        more = "" if name == "not watched" else f"{min(times) / first - 1:+.1%}"
        grown = "" if name == "not watched" else f" ({own / alone - 1:+.1%})"
        print(f"| {name} | {min(times):.2f} | {more} | {own:.2f} GiB{grown} |")


if __name__ == "__main__":
    main()
