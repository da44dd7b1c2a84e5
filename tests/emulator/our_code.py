"""Compiles what `mla_decode` launches, for AMD chips without one: run in its own process, for Triton's interpreter, when
switched on in a process, keeps `@triton.jit` functions from being compiled there.

    python our_code.py ARCH OUT.pickle
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from typing import Any

RANK, WIDTH = 512, 576
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Case:
    """A decode: keys and query tokens of each request, and the tokens after them that belong to none.

    `num_pages` None: as many as the requests need. More than the test has memory for are only spoken of when compiling.
    """

    heads: int
    page_size: int
    kv_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    padding: int = 0
    splits: int | None = None
    num_pages: int | None = None

    @property
    def tokens(self) -> int:
        return sum(self.query_lens) + self.padding

    @property
    def pages(self) -> list[int]:
        """Pages of each request."""
        return [-(-length // self.page_size) for length in self.kv_lens]


EDGES = (1, 15, 16, 17, 0, 63, 64, 65, 200)
CASES = {
    "16 heads, page size 64": Case(16, 64, EDGES, (1,) * 9, padding=1),
    "16 heads, page size 1, 3 splits": Case(16, 1, (1, 17, 0, 33, 200), (1,) * 5, splits=3),
    "16 heads, page size 16, a request over many programs": Case(16, 16, (3, 1000), (1, 1)),
    "16 heads, page size 16, 0 to 4 queries": Case(16, 16, (4, 33, 70, 0, 130, 1), (4, 1, 3, 1, 2, 0), padding=2),
    "16 heads, a cache over 2 GiB": Case(16, 64, (65, 130), (1, 1), num_pages=40000),
    "128 heads, page size 64": Case(128, 64, (1, 31, 0, 32, 33, 65, 200), (1,) * 7),
    "128 heads, page size 1, 2 splits": Case(128, 1, (1, 40, 130), (1,) * 3, splits=2),
}


@dataclass(frozen=True)
class Compiled:
    """A launch with its code object. A tensor among `values` is its name in the table of tensors."""

    name: str
    binary: bytes
    shared: int
    warps: int
    grid: tuple[int, int, int]
    signature: dict[str, str]
    values: dict[str, Any]


def compiled_case(case: Case, arch: str) -> tuple[list[Compiled], dict[str, tuple[tuple[int, ...], str]]]:
    """The launches of a decode in order, and shape and dtype of the tensors they name."""
    import torch

    from dualmla_kernels.compiled import compile_launch
    from dualmla_kernels.decode import mla_decode
    from dualmla_kernels.target import CHIPS, launches_on

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    requests = len(case.kv_lens)
    given = {"q": empty(case.tokens, case.heads, WIDTH, dtype=torch.bfloat16)}
    given["kv_cache"] = empty(case.num_pages or sum(case.pages), case.page_size, WIDTH, dtype=torch.bfloat16)
    given |= {"block_table": empty(requests, max(case.pages)), "seq_lens": empty(requests), "qo_indptr": empty(requests + 1)}
    results = {
        "out": empty(case.tokens, case.heads, RANK, dtype=torch.bfloat16),
        "lse": empty(case.heads, case.tokens, dtype=torch.float32),
    }
    with launches_on(CHIPS[arch]) as launches:
        mla_decode(*given.values(), max(case.query_lens), SCALE, causal=True, **results, num_kv_splits=case.splits)
    names = {id(tensor): name for name, tensor in (given | results).items()}
    tensors, compiled = {}, []
    for launch in launches:
        values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = names.setdefault(id(value), f"{launch.kernel.__name__}.{name}")
                tensors[values[name]] = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        kernel = compile_launch(launch, CHIPS[arch])
        grid = (*launch.grid, 1, 1)[:3]
        warps, signature = kernel.metadata.num_warps, dict(kernel.src.signature)
        compiled.append(Compiled(launch.kernel.__name__, kernel.asm["hsaco"], kernel.metadata.shared, warps, grid, signature, values))
    return compiled, tensors


if __name__ == "__main__":
    import our_code  # so that what is pickled belongs to a module that the reader can import

    with open(sys.argv[2], "wb") as file:
        pickle.dump({name: our_code.compiled_case(case, sys.argv[1]) for name, case in our_code.CASES.items()}, file)
