"""Time to trace Llama-8B's architecture on the meta device.

    python -m benchmarks.trace_meta [--layers 32]

32 layers of width 4,096, 32 heads in 8 groups, MLPs of width 14,336, a vocabulary of 128,256: 8 billion weights without memory. Needs transformers.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import excite
from benchmarks.timing import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    example = torch.zeros(1, 8, dtype=torch.long)
    wall, cpu = time.perf_counter(), time.process_time()
    wiring = excite.trace(model, example, output="logits")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    laws = [group.law for group in wiring.groups]
    print(f"{machine()}\n{len(wiring.layers)} layers, {len(wiring.attentions)} attentions, {len(laws)} groups")
    print(f"{wall:.1f} s, {cpu:.1f} s of CPU time, {memory:.1f} GB")


if __name__ == "__main__":
    main()
