"""What the host knows of a batch: numbers that size launches and cut tensors, from query lengths or from bounds on them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

Lengths = torch.Tensor | Sequence[int]


@dataclass(kw_only=True, eq=False)
class BatchCounts:
    """Numbers of one batch.

    Attributes:
        num_reqs: requests of both kinds, padding of a captured batch included.
        num_tokens: new tokens of all requests.
        max_query_len: an upper bound of the query lengths.
        num_decodes, num_decode_tokens, max_decode_query_len: the same of the leading requests, which take the decode path.
        exact: False where the query lengths lay on a GPU and were not read: numbers of tokens are upper bounds then.
        each: new tokens of a request where all are known to have as many.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    num_decodes: int
    num_decode_tokens: int
    max_decode_query_len: int
    exact: bool = True
    each: int | None = None


def counts_of_decodes(num_reqs: int, num_tokens: int, max_query_len: int, *, exact: bool = True) -> BatchCounts:
    """A batch of decodes alone."""
    return BatchCounts(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        num_decodes=num_reqs,
        num_decode_tokens=num_tokens,
        max_decode_query_len=max_query_len,
        exact=exact,
    )


def host_lengths(name: str, lengths: Lengths) -> Sequence[int]:
    """The lengths as ints of int32 on the host; a tensor on a GPU waits for it.

    Raises:
        TypeError: neither a tensor nor a sequence of ints.
        ValueError: an int that is none of int32.
    """
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.tolist()
    if type(lengths) is list:
        try:
            small = bytearray(lengths)
        except (TypeError, ValueError):
            pass
        else:
            if small.count(small[:1]) == len(small):  # what most steps bring, known four times as soon as by the array
                return small
    if not isinstance(lengths, Iterable):
        raise TypeError(f"{name} must be a tensor or a sequence of ints, got {type(lengths).__name__}")
    try:
        return array("i", lengths)
    except TypeError:
        wrong = next((length for length in lengths if not isinstance(length, SupportsIndex)), lengths)  # a tensor may still not be an index
        raise TypeError(f"{name} must be ints, got {wrong!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must fit into int32, got {max(lengths, key=abs)}") from None


def as_tensor(lengths: Sequence[int]) -> torch.Tensor:
    """What `host_lengths` returned, int32 [num_reqs] on the CPU."""
    if isinstance(lengths, array) and lengths:
        return torch.frombuffer(lengths, dtype=torch.int32)
    return torch.tensor(list(lengths), dtype=torch.int32)


def count_batch(query_lens: Sequence[int], threshold: int, num_decodes: int | None) -> BatchCounts:
    """The numbers of `query_lens`, ints of int32.

    Arguments:
        threshold: most new tokens of a decode.
        num_decodes: leading requests that take the decode path; None: all that may.

    Raises:
        TypeError: `num_decodes` is no int.
        ValueError: a negative length, or more decodes than there are.
    """
    num_reqs = len(query_lens)
    _check_num_decodes(num_decodes)
    if num_reqs == 0 or query_lens.count(query_lens[0]) == num_reqs:
        least = most = query_lens[0] if num_reqs else 0
        leading = num_reqs if most <= threshold else 0
    else:
        lengths = as_tensor(query_lens)
        least, most = (int(n) for n in lengths.aminmax())
        leading = num_reqs if most <= threshold else int((lengths > threshold).to(torch.uint8).argmax())
    if least < 0:
        raise ValueError(f"query_lens must not be negative, got {least}")
    if num_decodes is None:
        num_decodes = leading
    elif not 0 <= num_decodes <= leading:
        raise ValueError(
            f"num_decodes must be between 0 and {leading}, the leading requests of at most decode_threshold="
            f"{threshold} new tokens, got {num_decodes}"
        )
    if least == most:
        tokens, decode_tokens, max_decode = num_reqs * most, num_decodes * most, most if num_decodes else 0
    else:
        decodes = lengths[:num_decodes]
        tokens, decode_tokens = int(lengths.sum()), int(decodes.sum())
        max_decode = int(decodes.max()) if num_decodes else 0
    return BatchCounts(
        num_reqs=num_reqs,
        num_tokens=tokens,
        max_query_len=most,
        num_decodes=num_decodes,
        num_decode_tokens=decode_tokens,
        max_decode_query_len=max_decode,
        each=most if least == most else None,
    )


def bound_batch(num_reqs: int, num_decodes: int, threshold: int, *, max_seq_len: int, max_num_tokens: int | None) -> BatchCounts | None:
    """The numbers where the query lengths lie on a GPU and are not read; None where that leaves too much open.

    Without them the cut between the tokens of decodes and prefills is known only where each decode has one.

    Arguments:
        max_seq_len: most keys of a request, and so of its new tokens.
        max_num_tokens: most new tokens of the batch, where there is a limit.

    Raises:
        TypeError: `num_decodes` is no int.
        ValueError: more decodes than requests.
    """
    _check_num_decodes(num_decodes)
    if not 0 <= num_decodes <= num_reqs:
        raise ValueError(f"num_decodes must be between 0 and {num_reqs}, the number of requests, got {num_decodes}")
    num_prefills = num_reqs - num_decodes
    if num_prefills and (max_seq_len == 0 or (num_decodes and threshold > 1)):
        return None
    decode_tokens = num_decodes * threshold
    tokens = decode_tokens + num_prefills * max_seq_len
    if max_num_tokens is not None:
        tokens = min(tokens, max_num_tokens)
    return BatchCounts(
        num_reqs=num_reqs,
        num_tokens=tokens,
        max_query_len=min(max_seq_len, tokens) if num_prefills else min(threshold, tokens),
        num_decodes=num_decodes,
        num_decode_tokens=min(decode_tokens, tokens),
        max_decode_query_len=min(threshold, tokens) if num_decodes else 0,
        exact=False,
    )


def _check_num_decodes(num_decodes: object) -> None:
    """It cuts tensors: what is nearly an int would fail halfway, with the buffers overwritten."""
    if num_decodes is not None and type(num_decodes) is not int:
        raise TypeError(f"num_decodes must be None or an int, got {num_decodes!r}")
