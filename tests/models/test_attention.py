"""Every attention backend against masked softmax attention in float64, outputs and gradients.

Letters: T queries of the stream, S its keys, A heads, D width of a head.
"""

import time
from collections.abc import Sequence
from statistics import median

import pytest
import torch
from torch import Tensor

from wan_ds.errors import ConfigError
from wan_ds.models import attention
from wan_ds.models.attention import BACKENDS, attend_by, attend_within_clips, refuse_missing_backend

HEADS = 3
# Of each tensor's largest. Sums of up to 512 products, whose roundings of 6e-8 add up to 7e-7 on one machine.
FLOAT32 = 2e-6
# The same with roundings of 4e-3, of probabilities and results: the formula is given the rounded inputs.
BFLOAT16 = 1.5e-2

# queries and keys of each clip
LENGTHS = {
    "one clip": ([40], [40]),
    "equal": ([24, 24, 24], [24, 24, 24]),
    "unequal": ([40, 6, 16], [40, 6, 16]),
    "clips of one token": ([1, 1, 1], [1, 1, 1]),
    "one token beside many": ([1, 33], [1, 33]),
    "text": ([40, 6, 16], [512, 512, 512]),
    "text of equal clips": ([24, 24], [512, 512]),
    "an image of more tokens than the clip": ([5, 9], [257, 257]),
    "one rank's slice": ([17, 3], [64, 21]),
    "one token of a clip's": ([1, 8], [50, 50]),
    "equal queries, other keys": ([8, 8], [30, 2]),
}


def drawn(lengths: Sequence[Sequence[int]], width: int = 16) -> list[Tensor]:
    """Query `[T, A, D]`, key and value `[S, A, D]`, and what the output is multiplied with for a loss."""
    rng = torch.Generator().manual_seed(3)
    queries, keys = map(sum, lengths)
    return [torch.randn(n, HEADS, width, generator=rng) for n in (queries, keys, keys, queries)]


def dense(query: Tensor, key: Tensor, value: Tensor, query_tokens, key_tokens) -> Tensor:
    """The formula, with a mask over all pairs of the stream."""
    clip_of_query, clip_of_key = (
        torch.arange(len(tokens)).repeat_interleave(torch.tensor(tokens))
        for tokens in (query_tokens, key_tokens)
    )
    is_own = (clip_of_query[:, None] == clip_of_key).to(query.device)
    scores = torch.einsum("tad,sad->ats", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("ats,sad->tad", scores.masked_fill(~is_own, -torch.inf).softmax(-1), value)


def results(attend, tensors: Sequence[Tensor], lengths) -> dict[str, Tensor]:
    """Output, and the gradients of q, k and v."""
    inputs, weights = [tensor.detach().clone().requires_grad_() for tensor in tensors[:3]], tensors[3]
    output = attend(*inputs, *lengths)
    (output * weights).sum().backward()
    return {"output": output.detach()} | dict(zip("qkv", (tensor.grad for tensor in inputs), strict=True))


def expected(tensors: Sequence[Tensor], lengths) -> dict[str, Tensor]:
    return results(dense, [tensor.double() for tensor in tensors], lengths)


def worst(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest over tensors of max |difference| / max |value|.

    With one key alone q and k move nothing: their gradients, 0, are held against v's.
    """
    largest = {name: value.abs().max() for name, value in right.items()}
    return max(
        (found[name].double() - value).abs().max() / (largest[name] if largest[name] > 1e-9 else largest["v"])
        for name, value in right.items()
    ).item()


def by_clip(query, key, value, begins, ends, longest, longest_key) -> Tensor:
    """A kernel's stand-in where there is no GPU: it knows the clips by where they begin alone."""
    assert (begins.dtype, ends.dtype) == (torch.int32, torch.int32)
    assert (longest, longest_key) == (begins.diff().max(), ends.diff().max())
    spans = zip(*([*zip(b[:-1], b[1:], strict=True)] for b in (begins.tolist(), ends.tolist())), strict=True)
    parts = [(query[a:b], key[c:d], value[c:d]) for (a, b), (c, d) in spans]
    return torch.cat([dense(*part, [len(part[0])], [len(part[1])]) for part in parts])


def packed(*arguments) -> Tensor:
    return attend_by(by_clip, *arguments)


ON_A_CPU = {"auto": BACKENDS["auto"], "sdpa": BACKENDS["sdpa"], "a kernel for streams": packed}


@pytest.fixture(params=LENGTHS)
def lengths(request):
    return LENGTHS[request.param]


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_a_backend_gives_the_formulas_output_and_gradients(backend, lengths):
    tensors = drawn(lengths)
    assert worst(results(ON_A_CPU[backend], tensors, lengths), expected(tensors, lengths)) <= FLOAT32


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_a_float64_stream_is_computed_in_float64(backend):
    lengths = LENGTHS["unequal"]
    tensors = [tensor.double() for tensor in drawn(lengths)]
    assert worst(results(ON_A_CPU[backend], tensors, lengths), expected(tensors, lengths)) <= 1e-13


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("name", ["equal", "unequal", "text", "one rank's slice"])
def test_a_clip_does_not_see_another_clips_keys(backend, name):
    lengths = LENGTHS[name]
    query, key, value, _ = drawn(lengths)
    before = ON_A_CPU[backend](query, key, value, *lengths)
    first = lengths[1][0]
    key[:first], value[:first] = 1e4, -1e4
    after = ON_A_CPU[backend](query, key, value, *lengths)
    own = lengths[0][0]
    assert torch.equal(after[own:], before[own:])
    assert not torch.equal(after[:own], before[:own])


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([4, 4], [8]),
        ([3, 3], [3, 3]),
        ([8], [4, 4]),
        ([8, 0], [4, 4]),
        ([4, 4], [8, 0]),
        ([9, -1], [4, 4]),
        ([], []),
    ],
)
def test_tokens_that_do_not_add_up_are_refused(backend, queries, keys):
    x = torch.zeros(8, 2, 4)
    with pytest.raises(ValueError, match=r"queries of \[.*\] tokens in 8, keys of \[.*\] in 8"):
        ON_A_CPU[backend](x, x, x, queries, keys)


def test_where_clips_begin_is_computed_once_for_all_layers():
    seen = []

    def kernel(query, key, value, begins, ends, *longest):
        seen.extend([begins, ends])
        return query

    x = torch.zeros(9, 1, 2)
    for tokens in ((4, 5), [4, 5], (5, 4)):
        attend_by(kernel, x, x, x, tokens, tokens)
    assert len({id(tensor) for tensor in seen}) == 2
    assert seen[0].tolist() == [0, 4, 9]


def test_where_clips_begin_survives_from_sampling_into_training():
    x, tokens = torch.ones(9, 1, 2, requires_grad=True), (2, 7)
    kept = []
    with torch.inference_mode():
        attend_by(lambda q, k, v, begins, *rest: kept.append(begins) or q, x, x, x, tokens, tokens)
    assert not kept[0].is_inference()


def test_a_kernel_for_streams_is_refused_where_there_is_none():
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="model.attention=varlen: .* on its CPU; type model.attention=auto"):
        refuse_missing_backend("varlen", cpu)
    for name in ("auto", "sdpa"):
        refuse_missing_backend(name, cpu)
    x = torch.zeros(8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="attention by varlen: .*CPU; choose auto or sdpa"):
        BACKENDS["varlen"](x, x, x, [8], [8])


def test_a_gpu_without_the_kernel_is_told_what_it_lacks(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    attention._no_kernel_on.cache_clear()
    with pytest.raises(ConfigError, match="compute capability 8.0 and later, not 7.5"):
        refuse_missing_backend("varlen", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "_varlen_kernel", lambda: None)
    attention._no_kernel_on.cache_clear()
    with pytest.raises(ConfigError, match="neither torch 2.10 or later nor flash-attn is installed"):
        refuse_missing_backend("varlen", gpu)
    attention._no_kernel_on.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "width", "why"),
    [
        (torch.float32, 128, "takes float16 and bfloat16, not torch.float32"),
        (torch.bfloat16, 12, "heads of 8 to 256 by eights, not 12"),
        (torch.bfloat16, 264, "not 264"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_and_auto_takes_the_other(monkeypatch, dtype, width, why):
    monkeypatch.setattr(attention, "_no_kernel_on", lambda device: None)
    x, lengths = torch.ones(8, 2, width, dtype=dtype), ([6, 2], [6, 2])
    with pytest.raises(ValueError, match=why):
        BACKENDS["varlen"](x, x, x, *lengths)
    assert torch.equal(BACKENDS["auto"](x, x, x, *lengths), attend_within_clips(x, x, x, *lengths))


@pytest.mark.parametrize("name", LENGTHS)
def test_auto_takes_the_kernel_for_clips_of_differing_lengths(monkeypatch, name):
    """One batched call is as good for equal ones."""
    calls = []
    monkeypatch.setattr(attention, "_no_kernel_on", lambda device: None)
    monkeypatch.setattr(attention, "_varlen_kernel", lambda: lambda q, *rest: calls.append(q) or q)
    lengths = LENGTHS[name]
    query, key, value, _ = (tensor.bfloat16() for tensor in drawn(lengths))
    BACKENDS["auto"](query, key, value, *lengths)
    assert bool(calls) == any(len(set(tokens)) > 1 for tokens in lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpus_backends_give_the_formulas_output_and_gradients(backend, lengths):
    tensors = [tensor.bfloat16().cuda() for tensor in drawn(lengths, width=128)]
    found = results(BACKENDS[backend], tensors, lengths)
    assert worst(found, expected(tensors, lengths)) <= BFLOAT16


@pytest.mark.gpu
def test_one_kernel_for_eight_clips_is_no_slower_than_eight():
    lengths = [1560, 3120, 780, 4680, 2340, 390, 1170, 6240]
    rng = torch.Generator("cuda").manual_seed(0)
    shape, options = (sum(lengths), 12, 128), {"device": "cuda", "dtype": torch.bfloat16, "generator": rng}
    tensors = [torch.randn(shape, **options) for _ in range(4)]

    def seconds(backend: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        results(BACKENDS[backend], tensors, (lengths, lengths))
        torch.cuda.synchronize()
        return time.perf_counter() - start

    times = {backend: [] for backend in ("sdpa", "varlen")}
    for _ in range(13):
        for backend, taken in times.items():
            taken.append(seconds(backend))
    by_backend = {backend: median(taken[3:]) for backend, taken in times.items()}
    assert by_backend["varlen"] <= 1.02 * by_backend["sdpa"], by_backend  # clocks differ by about 1 %
