"""Which way is cheaper for a short prefill: over the latent rows themselves, or over keys and values made from them.

    python bench/bench_forward.py

The whole of both ways of a layer of DeepSeek's sizes, products with W_UK and W_UV, gathering and merging included, replayed from a
graph with a cold L2 cache; checked against one another before they are timed. The table is the evidence of
`dualmla.attention.absorbed_is_cheaper`, whose answer it shows: `!` marks those that cost more than a tenth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import triton
from conftest import machine

import dualmla
from dualmla.attention import absorbed_is_cheaper
from dualmla.context import PrefillPlan

QUERIES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (0, 1024, 8192)
PAGE = 64


class Layer(dualmla.TritonMLAImpl):
    """A layer that goes the way it is told."""

    absorbed = False

    def _absorbs(self, plan: PrefillPlan) -> bool:
        return self.absorbed


def layer_of(heads: int, device: torch.device) -> Layer:
    cfg = dualmla.MLAConfig(num_heads=heads, softmax_scale=0.1, page_size=PAGE)
    w_uk = torch.randn(heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank, device=device).to(cfg.dtype) / 20
    w_uv = torch.randn(heads, cfg.kv_lora_rank, cfg.v_head_dim, device=device).to(cfg.dtype) / 20
    return Layer(cfg, w_uk, w_uv)


def ways(layer: Layer, requests: int, queries: int, context: int) -> list[Callable[[], torch.Tensor]]:
    """The forward of `requests` prefills, up-projected and absorbed; each returns its output."""
    cfg, device = layer.cfg, layer.w_uk.device
    pages, tokens = -(-(context + queries) // PAGE), requests * queries
    cache = torch.randn(requests * pages, PAGE, cfg.latent_dim, device=device).to(cfg.dtype)
    table = torch.randperm(requests * pages, device=device).view(requests, pages).int()
    builder = dualmla.MLAMetadataBuilder(cfg, device, max_num_seqs=requests, max_num_pages_per_seq=pages, max_num_tokens=tokens)
    seq_lens = torch.full((requests,), context + queries, dtype=torch.int32, device=device)
    meta = builder.build(table, seq_lens, [queries] * requests)
    widths = ((cfg.num_heads, cfg.qk_head_dim), (cfg.kv_lora_rank,), (cfg.qk_rope_head_dim,))
    q, kv_c, k_pe = (torch.randn(tokens, *width, device=device).to(cfg.dtype) for width in widths)

    def way(absorbed: bool) -> Callable[[], torch.Tensor]:
        output = torch.empty(tokens, cfg.num_heads * cfg.v_head_dim, dtype=cfg.dtype, device=device)

        def forward() -> torch.Tensor:
            layer.absorbed = absorbed
            return layer.forward(q, kv_c, k_pe, cache, meta, output=output)

        return forward

    return [way(False), way(True)]


def milliseconds(function: Callable[[], object]) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return float(triton.testing.do_bench(graph.replay, warmup=3, rep=15, return_mode="median"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print("| heads | requests | context | " + " | ".join(f"{n} queries" for n in QUERIES) + " |")
    print("|---" * (3 + len(QUERIES)) + "|")
    for heads, requests, context in itertools.product(arguments.heads, arguments.requests, CONTEXTS):
        layer, cells = layer_of(heads, device), []
        for queries in QUERIES:
            up_projected, absorbed = ways(layer, requests, queries, context)
            want, got = up_projected().float(), absorbed().float()
            difference = float((got - want).norm() / want.norm())
            if not difference < 2e-2:
                raise RuntimeError(f"{heads} heads, {requests} x {queries} over {context}: the two ways differ by {difference:.1e}")
            times = milliseconds(up_projected), milliseconds(absorbed)
            chosen = absorbed_is_cheaper(layer.cfg, [queries] * requests, [context] * requests)
            mark = ("A" if chosen else "U") + ("!" if times[chosen] > 1.1 * min(times) else "")
            cells.append(f"{times[0]:.3f} {times[1]:.3f} {mark}")
        print(f"| {heads} | {requests} | {context} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
