"""Compiles the kernels of `triton_kernels` for AMD chips without one: run in its own process, for Triton's interpreter,
when switched on in a process, keeps `@triton.jit` functions from being compiled there.

    python triton_code.py ARCH NUM_STAGES OUT.pickle
"""

from __future__ import annotations

import pickle
import sys


def main(arch: str, stages: int, target: str) -> None:
    import triton
    import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = {}
    for name, (kernel, signature, constants, aligned) in triton_kernels.KERNELS.items():
        attributes = {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(signature) if argument in aligned}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=GPUTarget("hip", arch, 64), options={"num_warps": 4, "num_stages": stages})
        compiled[name] = (binary.asm["hsaco"], binary.metadata.shared)
    with open(target, "wb") as file:
        pickle.dump(compiled, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
