"""Recomputation changes no gradient, and selective recomputation computes no attention again."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_transformer import batch_of, results, stock, through_clips, twin
from wan_ds.models.recompute import ATTENTION, EXCHANGE, recompute

KINDS = ["none", "full", "selective"]


class Counting(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))

    @property
    def attentions(self) -> int:
        return sum(count for name, count in self.calls.items() if name in ATTENTION)


@pytest.mark.parametrize("variant", ["i2v", "ti2v"])
def test_gradients_are_the_same_to_the_last_bit(variant):
    model = twin(stock(variant)).train()
    batch = batch_of(variant, frames=[(1, 2), (1,), (2,)] if variant == "ti2v" else None)
    found = {}
    for kind in KINDS:
        recompute(model, kind)
        found[kind] = results(through_clips, model, batch)
    recompute(model, "selective", keep_ffn=True)
    found["with the feed-forward kept"] = results(through_clips, model, batch)
    for kind, tensors in found.items():
        for name, tensor in found["none"].items():
            assert torch.equal(tensors[name], tensor), (kind, name)


def test_selective_computes_self_attention_once_and_the_rest_twice():
    """Two blocks, three clips of unequal sizes: three calls for self-attention, three for cross-attention."""
    model, batch = twin(stock("t2v")).train(), batch_of("t2v")
    calls, products = {}, {}
    for kind in KINDS:
        recompute(model, kind)
        with Counting() as counting:
            results(through_clips, model, batch)
        calls[kind], products[kind] = counting.attentions, counting.calls["aten::addmm"]
    assert calls == {"none": 12, "full": 24, "selective": 18}
    assert products["selective"] == products["full"] > products["none"]
    recompute(model, "selective", keep_ffn=True)
    with Counting() as counting:
        results(through_clips, model, batch)
    assert counting.attentions == 18
    assert counting.calls["aten::addmm"] == products["selective"] - 2  # one in each block


def _bytes_kept(model, batch) -> int:
    """Of distinct storages that autograd holds for backward, weights and inputs left out."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = through_clips(model, batch)
    del outputs
    return sum(kept.values())


def test_each_kind_keeps_less_than_the_one_before_it():
    model, batch = twin(stock("t2v")).train(), batch_of("t2v", [(3, 16, 16)])
    kept = {}
    for kind in KINDS:
        recompute(model, kind)
        kept[kind] = _bytes_kept(model, batch)
    # What selective keeps beyond full is held beside autograd: 192 tokens of 48, and their log-sum-exps.
    assert kept["full"] <= kept["selective"] < 0.3 * kept["none"]


def test_a_second_backward_through_what_was_kept_is_the_first():
    model, batch = twin(stock("t2v")).train(), batch_of("t2v")
    recompute(model, "selective")
    loss = sum(output.square().sum() for output in through_clips(model, batch))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_without_gradients_nothing_is_kept():
    model, batch = twin(stock("t2v")).train(), batch_of("t2v")
    recompute(model, "selective")
    with torch.no_grad(), Counting() as counting:
        through_clips(model, batch)
    assert counting.attentions == 12


@pytest.mark.parametrize(
    ("kind", "keeps", "told"),
    [
        ("blocks", {}, "choose none, full or selective"),
        ("full", {"keep_exchange": True}, "only selective recomputation keeps"),
        ("none", {"keep_ffn": True}, "only selective recomputation keeps"),
    ],
)
def test_what_cannot_be_is_refused(kind, keeps, told):
    with pytest.raises(ValueError, match=told):
        recompute(twin(stock("t2v")), kind, **keeps)


def test_no_collective_can_be_kept():
    """Kept, it would be memory that something else has filled by then: the lists name no such operator."""
    assert not [name for name in ATTENTION | EXCHANGE if name.startswith(("c10d", "_c10d"))]
