"""What `dualmla certify` found on this machine, and whether auto may trust AITER with a call.

A certificate is a JSON file that says of each shape whether AITER's results agreed with float64. With one, auto gives AITER the
shapes that passed and no others; without, the support table decides, which is said once, or under
DUALMLA_REQUIRE_CERTIFICATE=1 AITER gets nothing. Made with another release of AITER, on another arch or under another driver, it
is none.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualmla.backends.aiter.signatures import Aiter
from dualmla.backends.base import DecodeCall, PrefillCall

FORMAT = 1
MAKE_ONE = "make one with `dualmla certify`"


@dataclass(frozen=True)
class Shape:
    """What calls share that run the same kernel of AITER.

    Attributes:
        operation: "decode" or "prefill".
        num_heads: query heads on this rank.
        query_len: most query tokens a request of a decode; without a causal mask AITER is asked row by row, as for 1. 0: a prefill.
        return_lse: the LSE of a decode is wanted; a prefill has it always.
        kv_cache_dtype: of the cache that a decode reads, such as "float8_e4m3fnuz".
    """

    operation: str
    num_heads: int
    query_len: int
    return_lse: bool
    kv_cache_dtype: str = "bfloat16"

    @classmethod
    def of(cls, call: DecodeCall | PrefillCall) -> Shape:
        """The shape of a call that AITER does not refuse."""
        if isinstance(call, PrefillCall):
            return cls("prefill", call.num_heads, 0, True)
        dtype = str(call.kv_cache_dtype).removeprefix("torch.")
        return cls("decode", call.num_heads, call.max_query_len if call.causal else 1, call.return_lse, dtype)

    def __str__(self) -> str:
        if self.operation == "prefill":
            return f"prefill of {self.num_heads} heads"
        over = "" if self.kv_cache_dtype == "bfloat16" else f" over a {self.kv_cache_dtype} cache"
        return f"decode of {self.num_heads} heads, {self.query_len} query tokens{' and the LSE' if self.return_lse else ''}{over}"


@dataclass(frozen=True)
class Entry:
    """What became of a shape.

    Attributes:
        passed: every case agreed with float64.
        cases: so many were run.
        budget_used: the largest share of its allowance that an error took; above 1 is a failure.
        seconds: of all cases.
        why: what failed, a sentence; empty where it passed.
    """

    shape: Shape
    passed: bool
    cases: int
    budget_used: float
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """What a certificate is bound to.

    Attributes:
        release: of AITER's distribution.
        generation: of its signature.
        arch: such as "gfx942".
        driver: ROCm that torch was built for, and the kernel's amdgpu driver where it says.
    """

    release: str
    generation: str
    arch: str
    driver: str

    @classmethod
    def here(cls, aiter: Aiter, arch: str) -> Machine:
        """This machine with the AITER imported."""
        return cls(aiter.version, aiter.signature.generation, arch, _driver())


@dataclass(frozen=True)
class Certificate:
    """Everything that was found.

    Attributes:
        machine: where.
        date: when, in UTC.
        entries: one a shape.
    """

    machine: Machine
    date: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        passed, machine = sum(entry.passed for entry in self.entries), self.machine
        return (
            f"{passed} of {len(self.entries)} shapes passed on {self.date} "
            f"(AITER {machine.release} of generation {machine.generation}, {machine.arch}, {machine.driver})"
        )

    @functools.cached_property
    def by_shape(self) -> dict[Shape, Entry]:
        return {entry.shape: entry for entry in self.entries}

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        part.replace(path)


def default_path() -> Path:
    """`DUALMLA_CERTIFICATE`, else a file in the user's cache."""
    if named := os.environ.get("DUALMLA_CERTIFICATE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "dualmla" / "aiter-certificate.json"


def required() -> bool:
    """Whether `DUALMLA_REQUIRE_CERTIFICATE` is on.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get("DUALMLA_REQUIRE_CERTIFICATE") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"DUALMLA_REQUIRE_CERTIFICATE is {value!r}; it must be 0 or 1")
    return value == "1"


def in_force(machine: Machine) -> Certificate | str:
    """The certificate that counts here, or why there is none. Read again when the file changes."""
    path = default_path()
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return f"there is no certificate at {path}: {MAKE_ONE}"
    return _read(path, changed, machine)


def doubts(call: DecodeCall | PrefillCall, certificate: Certificate | str) -> list[str]:
    """Why AITER is not to be trusted with a call that it takes.

    Arguments:
        certificate: from `in_force`.

    Raises:
        ValueError: `DUALMLA_REQUIRE_CERTIFICATE` is neither 0 nor 1.
    """
    if isinstance(certificate, str):
        return [f"{certificate} (DUALMLA_REQUIRE_CERTIFICATE=1)"] if required() else []
    shape = Shape.of(call)
    entry = certificate.by_shape.get(shape)
    if entry is None:
        return [f"the certificate of {certificate.date} does not cover a {shape}: {MAKE_ONE} that does"]
    return [] if entry.passed else [f"a {shape} failed when it was certified on {certificate.date}: {entry.why}"]


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed: int, machine: Machine) -> Certificate | str:
    try:
        certificate = _parsed(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the certificate {path} can't be read ({type(error).__name__}: {error}): {MAKE_ONE}"
    for name, here in dataclasses.asdict(machine).items():
        if (there := getattr(certificate.machine, name)) != here:
            return f"the certificate {path} is of {name} {there}, here is {here}: {MAKE_ONE}"
    return certificate


def _parsed(fields: dict[str, Any]) -> Certificate:
    if fields["format"] != FORMAT:
        raise ValueError(f"format {fields['format']}, not {FORMAT}")
    entries = tuple(Entry(**{**entry, "shape": Shape(**entry["shape"])}) for entry in fields["entries"])
    return Certificate(Machine(**fields["machine"]), fields["date"], entries)


@functools.cache
def _driver() -> str:
    kernel = Path("/sys/module/amdgpu/version")
    return f"ROCm {torch.version.hip}" + (f", amdgpu {kernel.read_text().strip()}" if kernel.exists() else "")
