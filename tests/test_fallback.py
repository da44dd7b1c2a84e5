"""What auto does when a backend refuses a call, is not trusted with it, or raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dualmla import decode_metadata, fallback
from dualmla.backends.base import DecodeCall, MLABackend, PrefillCall
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.fallback import chained

Q = torch.randn(2, 3, 576, generator=torch.Generator().manual_seed(0))
CACHE = torch.randn(9, 1, 576, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _nothing_broken() -> Iterator[None]:
    fallback._broken.clear()
    fallback.log_once.cache_clear()
    yield
    fallback._broken.clear()


def raising(error: Exception, **attributes: Any) -> type[MLABackend]:
    """A backend that counts its decodes in `calls` and raises."""

    class Raising(ReferenceMLABackend):
        name = "raising"
        may_raise = True
        calls = 0

        @classmethod
        def mla_decode(cls, *args: Any, out: torch.Tensor, **kwargs: Any) -> None:
            cls.calls += 1
            out.fill_(float("nan"))
            raise error

    for name, value in attributes.items():
        setattr(Raising, name, value)
    return Raising


def decode(backend: type[MLABackend], *, heads: int = 3, keys: int = 5) -> torch.Tensor:
    meta = decode_metadata(torch.arange(8, dtype=torch.int32).view(2, 4).repeat(1, 2), [keys, 1], page_size=1, device="cpu")
    out = torch.empty(2, heads, 512)
    backend.mla_decode(Q[:, :heads], CACHE, meta, 0.1, causal=True, out=out, lse=None, k_scale=1.0, num_kv_splits=None)
    return out


def test_a_call_that_raised_goes_to_the_next_backend_and_so_does_its_shape(caplog: pytest.LogCaptureFixture) -> None:
    backend = raising(RuntimeError("asm_mla.cu: no\n kernel"))
    chain = chained((backend, ReferenceMLABackend))
    for keys in (5, 7, 3):  # other lengths are the same shape
        assert torch.equal(decode(chain, keys=keys), decode(ReferenceMLABackend, keys=keys))
    assert backend.calls == 1
    assert caplog.messages[0] == (
        "a decode goes to the next backend, and so do all of its shape from now on, raising: "
        "it raised RuntimeError on a call of this shape: asm_mla.cu: no kernel"
    )
    decode(chain, heads=2)
    assert backend.calls == 2
    assert len([message for message in caplog.messages if "from now on" in message]) == 2


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (RuntimeError("a bug of ours"), {"may_raise": False, "doubts": classmethod(lambda cls, call: [])}),
        (torch.OutOfMemoryError("no memory"), {}),
        (KeyboardInterrupt(), {}),
    ],
)
def test_what_raises_all_the_same(error: Exception, attributes: dict[str, Any]) -> None:
    backend = raising(error, **attributes)
    with pytest.raises(type(error)):
        decode(chained((backend, ReferenceMLABackend)))
    assert not fallback._broken


def test_a_spoiled_capture_and_a_faulted_gpu_are_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert fallback._survivable(cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not fallback._survivable(cuda)

    def faulted(device: torch.device) -> None:
        raise RuntimeError("HIP error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", faulted)
    assert not fallback._survivable(cuda)
    monkeypatch.setattr(fallback, "_survivable", lambda device: False)
    with pytest.raises(RuntimeError, match="the kernel"):
        decode(chained((raising(RuntimeError("the kernel")), ReferenceMLABackend)))


def test_doubts_hand_a_call_on(caplog: pytest.LogCaptureFixture) -> None:
    backend = raising(RuntimeError(), doubts=classmethod(lambda cls, call: ["the certificate says no"]))
    decode(chained((backend, ReferenceMLABackend)))
    assert backend.calls == 0
    assert caplog.messages == ["a decode goes to the next backend, raising refused it: the certificate says no"]


def test_a_backend_that_hands_nothing_on_is_left_as_it_is() -> None:
    assert chained((ReferenceMLABackend,)) is ReferenceMLABackend
    assert chained((ReferenceMLABackend, raising(RuntimeError()))) is ReferenceMLABackend
    backend = raising(RuntimeError())
    assert chained((backend, ReferenceMLABackend)).get_impl_cls().ops is chained((backend, ReferenceMLABackend))


def test_shapes_leave_out_the_sizes_of_the_batch() -> None:
    meta = decode_metadata(torch.zeros(2, 4, dtype=torch.int32), [1, 1], page_size=1, device="cpu")
    kwargs: dict[str, Any] = {"kv_lora_rank": 512, "causal": True, "return_lse": False, "num_kv_splits": None}
    a, b = DecodeCall.of(Q, CACHE, meta, **kwargs), DecodeCall.of(Q[:1], CACHE[:3], meta, **kwargs)
    assert a != b
    assert a.shape == b.shape
    assert a.shape != DecodeCall.of(Q[:, :1], CACHE, meta, **kwargs).shape
    assert PrefillCall.of(Q, Q).shape == PrefillCall.of(Q[:1], Q).shape
