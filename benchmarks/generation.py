"""Speed of text generation with and without CUDA graphs, and on one GPU with transformers.

    python -m benchmarks.generation --shape llama3_8b --batch 1 8 32
    torchrun --nproc-per-node 4 -m benchmarks.generation --batch 1 8 32

The model has random bfloat16 weights with a published shape. After prompts of
``--prompt`` tokens, it generates ``--new`` tokens greedily. The time of a token is the mean over
later new tokens; the pass over the prompt has a separate column. The bound is the time to read this
GPU's weights of all layers and the head, and keys and values of average length, once, at the speed
of memory copies, which the program measures first. Several processes divide each matrix product
(tp). tests/gpu/test_gpu_generation.py compares the generated tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import heading, option_parser
from benchmarks.recipe_speeds import MODELS, shrunk
from lightning_megatron import GPT, GenerationSettings
from lightning_megatron.generation.decoding import generated_tokens, gpt_of
from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.swap import parallelize

SHAPES = {"llama3_8b": MODELS["llama3_8b"], "tiny": shrunk(MODELS["llama3_8b"])}
TITLES = ("batch", "passes", "prompt, ms", "ms a token", "tokens/s", "bound, ms", "of the bound")


def copy_speed() -> float:
    """Return the speed of copies of 4 GiB, counting bytes read and written (bytes/s)."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * 2**32 / min(times)


def bytes_of_token(gpt: GPT, batch: int, length: float) -> float:
    """Return the data that this rank must read to generate one token of each row (bytes)."""
    config = gpt.config
    weights = sum(parameter.nbytes for parameter in gpt.parameters())
    if gpt.head is not None and gpt.embedding is not None:
        # A pass reads only one row of the embedding for each row of the batch.
        weights -= gpt.embedding.word.weight.nbytes
    heads = max(1, config.kv_heads // gpt.mesh.tp.size)
    width = heads * (config.head_size + config.value_size)
    return weights + batch * length * config.num_layers * width * gpt.dtype.itemsize


def timed(tokens: Iterator[list[int | None]]) -> tuple[float, float]:
    """Return the time to the first token, and the mean time of each later token (seconds)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    next(tokens)
    first = time.perf_counter()
    # The mean excludes the time to capture the CUDA graph.
    next(tokens)
    next(tokens)
    later_start = time.perf_counter()
    num_later = sum(1 for _ in tokens)
    end = time.perf_counter()
    return first - start, (end - later_start) / num_later


class Clock:
    """Streamer for transformers' ``generate`` that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(model: Any, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
    """Return the times of transformers' ``generate``, as :func:`timed` does (seconds)."""
    rows = torch.tensor(prompts, device="cuda")
    clock = Clock()
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        streamer=clock if len(rows) == 1 else None,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
    )
    torch.cuda.synchronize()
    end = time.perf_counter()
    if len(rows) > 1:
        # A streamer supports one row only. The time per token then includes the prompt.
        return 0.0, (end - start) / num_new
    # The first call of the streamer passes the prompt.
    times = clock.times[1:]
    return times[0] - start, (times[-1] - times[2]) / (len(times) - 3)


def mesh_of(world: int) -> ParallelMesh:
    """Return the groups of this process; all processes form one tensor-parallel group."""
    device = torch.device("cuda", torch.cuda.current_device())
    if world == 1:
        return ParallelMesh.single(device)
    dist.init_process_group("nccl", device_id=device)
    return ParallelMesh.create(ParallelLayout(world, tp=world), device=device)


def main() -> None:
    """Print the table."""
    args = read_options()

    from transformers import AutoConfig, AutoModelForCausalLM

    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    speed = copy_speed()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(1234)
    with torch.device("cuda"):
        config = AutoConfig.for_model(**SHAPES[args.shape])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    results: dict[tuple[int, str], tuple[float, float]] = {}
    prompts = {batch: torch.randint(1, 1000, (batch, args.prompt)).tolist() for batch in args.batch}
    with torch.no_grad():
        for batch in args.batch if world == 1 else ():
            for _ in range(args.rounds):
                prompt_time, token_time = theirs(model, prompts[batch], args.new)
                keep(results, (batch, "transformers"), prompt_time, token_time)
    root = torch.nn.ModuleDict({"model": model})
    mesh = mesh_of(world)
    parallelize(root, mesh)
    # Free the weights that this rank does not hold.
    del model
    gc.collect()
    torch.cuda.empty_cache()
    gpt = gpt_of(root)
    for batch in args.batch:
        for name, cuda_graph in (("captured", True), ("not captured", False)):
            for _ in range(args.rounds):
                settings = GenerationSettings(args.new, cuda_graph=cuda_graph)
                tokens = generated_tokens(root, prompts[batch], settings)
                prompt_time, token_time = timed(tokens)
                keep(results, (batch, name), prompt_time, token_time)
    lines = heading(*TITLES)
    for batch in args.batch:
        bound = bytes_of_token(gpt, batch, args.prompt + args.new / 2) / speed
        lines += rows_of(results, batch, bound)
    device = torch.cuda.get_device_name()
    gpus = device if world == 1 else f"{world} x {device}, tp={world}"
    lines.insert(0, f"{gpus}, copies at {speed / 1e12:.2f} TB/s, {args.shape}\n")
    if mesh.world.rank > 0:
        return
    print("\n".join(lines))


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = option_parser(__doc__)
    add = parser.add_argument
    add("--shape", default="llama3_8b", choices=sorted(SHAPES))
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--prompt", type=int, default=512)
    add("--new", type=int, default=256)
    add("--rounds", type=int, default=2)
    return parser.parse_args()


def rows_of(
    results: dict[tuple[int, str], tuple[float, float]], batch: int, bound: float
) -> list[str]:
    """Return the rows of a batch size; ``bound`` is the shortest possible time of a token (s)."""
    return [
        f"| {batch} | {name} | {1e3 * prompt_time:.1f} | {1e3 * token_time:.2f} | "
        f"{batch / token_time:,.0f} | {1e3 * bound:.2f} | {bound / token_time:.0%} |"
        for (size, name), (prompt_time, token_time) in results.items()
        if size == batch
    ]


def keep(
    results: dict[tuple[int, str], tuple[float, float]],
    key: tuple[int, str],
    prompt_time: float,
    token_time: float,
) -> None:
    """Keep the fastest times of a kind; print the new times, in case the run ends early."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            f"batch {key[0]}, {key[1]}: {1e3 * prompt_time:.1f} ms, {1e3 * token_time:.2f} ms",
            flush=True,
        )
    best = results.get(key, (prompt_time, token_time))
    results[key] = min(best[0], prompt_time), min(best[1], token_time)


if __name__ == "__main__":
    main()
