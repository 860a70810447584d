"""The count of operations against torch's own counter on the model, and against Wan's known sizes."""

from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.variants import ARCHITECTURES, IMAGE_TOKENS
from wan_ds.models.flops import attention_flops, blocks_flops, forward_flops, training_flops
from wan_ds.models.transformer import WanTransformer

CONF = Path(__file__).parents[2] / "conf" / "model"
GRIDS = [(3, 4, 5), (2, 3, 4)]
SEGMENTS = [(1, 2), (2,)]
GRIDS_OF_14B = {"720p81": (21, 45, 80), "480p81": (21, 30, 52), "480p49": (13, 30, 52)}


def config_of(name: str) -> dict:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())["transformer"]


def counted(config: dict, grids: list, image_tokens: int, segments: list | None) -> FlopCounterMode:
    """torch's counter after a forward of tensors without data, attention by its two plain products."""
    fake = FakeTensorMode()
    with fake:
        model = WanTransformer(**config)
        clips = [torch.zeros(config["in_channels"], f, 2 * h, 2 * w) for f, h, w in grids]
        count = len(grids) if segments is None else sum(map(len, segments))
        inputs = [torch.zeros(count), torch.zeros(len(grids), 512, config["text_dim"])]
        if image_tokens:
            inputs.append(torch.zeros(len(grids), image_tokens, config["image_dim"]))
    counter = FlopCounterMode(display=False)
    with fake, counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(clips, *inputs, segment_frames=segments)
    return counter


@pytest.mark.parametrize("variant", ARCHITECTURES)
@pytest.mark.parametrize(
    ("grids", "segments"),
    [(GRIDS[:1], None), (GRIDS, None), (GRIDS, SEGMENTS)],
    ids=["one clip", "two sizes", "segments"],
)
def test_a_forward_counts_what_torch_counts(variant, grids, segments):
    config, image_tokens = ARCHITECTURES[variant], IMAGE_TOKENS.get(variant, 0)
    count = None if segments is None else sum(map(len, segments))
    ours = forward_flops(config, grids, image_tokens, segments=count)
    assert ours == counted(config, grids, image_tokens, segments).get_total_flops()


@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_the_blocks_and_their_attention_count_what_torch_counts(variant):
    config, image_tokens = ARCHITECTURES[variant], IMAGE_TOKENS.get(variant, 0)
    by_module = counted(config, GRIDS, image_tokens, None).get_flop_counts()
    of_blocks = [sum(by_module[f"WanTransformer.blocks.{index}"].values()) for index in range(2)]
    assert blocks_flops(config, GRIDS, image_tokens) == sum(of_blocks)
    attention = by_module["WanTransformer.blocks.0.attn1"][torch.ops.aten.bmm]
    assert attention_flops(config, GRIDS) == 2 * attention


def test_a_model_of_full_size_counts_what_torch_counts():
    config = config_of("wan2.1-i2v-14b-480p")
    grid = GRIDS_OF_14B["480p49"]
    assert forward_flops(config, [grid], 257) == counted(config, [grid], 257, None).get_total_flops()


@pytest.mark.parametrize(("size", "tera"), [("720p81", 19_570), ("480p81", 5_035), ("480p49", 2_497)])
def test_three_forwards_of_the_blocks_of_14b_are_the_known_numbers(size, tera):
    """The known numbers are of the blocks alone; embeddings and head are 0.01 % more."""
    config, grids = config_of("wan2.1-t2v-14b"), [GRIDS_OF_14B[size]]
    assert round(3 * blocks_flops(config, grids) / 1e12) == tera
    assert training_flops(config, grids) / 1e12 == pytest.approx(tera, rel=3e-4)


@pytest.mark.parametrize(("size", "tera"), [("720p81", 19_621), ("480p81", 5_059)])
def test_image_tokens_add_the_known_numbers(size, tera):
    config, grids = config_of("wan2.1-i2v-14b-480p"), [GRIDS_OF_14B[size]]
    assert round(3 * blocks_flops(config, grids, 257) / 1e12) == tera


def test_attention_has_the_known_shares():
    config = config_of("wan2.1-t2v-14b")
    shares = [
        attention_flops(config, [grid]) / blocks_flops(config, [grid]) for grid in GRIDS_OF_14B.values()
    ]
    assert shares == pytest.approx([0.72, 0.52, 0.41], abs=0.01)


def test_recomputation_adds_the_blocks_once_more_and_selective_spares_attention():
    config, grids = ARCHITECTURES["t2v"], GRIDS
    plain = training_flops(config, grids, segments=3)
    assert plain == 3 * forward_flops(config, grids, segments=3)
    full = training_flops(config, grids, segments=3, recompute="full")
    assert full - plain == blocks_flops(config, grids)
    selective = training_flops(config, grids, segments=3, recompute="selective")
    assert full - selective == attention_flops(config, grids)


@pytest.mark.parametrize(("variant", "image_tokens"), [("t2v", 257), ("i2v", 0)])
def test_image_tokens_that_do_not_fit_the_model_are_refused(variant, image_tokens):
    with pytest.raises(ValueError, match="image tokens"):
        forward_flops(ARCHITECTURES[variant], GRIDS, image_tokens)
