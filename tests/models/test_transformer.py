"""The stream of tokens against stock diffusers: outputs and all gradients of every variant, by both doors.

Letters: B clips, F H W latent frames, height and width, T tokens, d the model's width.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.variants import ARCHITECTURES, IMAGE_TOKENS, randomised
from wan_ds.models import attention, transformer
from wan_ds.models.attention import WholeSequence, attend_within_clips
from wan_ds.models.transformer import WanTransformer, check_rope, reset_rope

# Two float32 computations of one formula; by this measure stock diffusers is up to 1.5e-5 off float64 itself.
TOLERANCE = 1e-5
SIZES = [(3, 8, 8), (1, 6, 4), (2, 4, 8)]


@dataclass
class Batch:
    clips: list[Tensor]  # [C, F, H, W]
    timestep: Tensor  # [segments]
    text: Tensor  # [B, 512, text width]
    image: Tensor | None  # [B, tokens, image width]
    frames: list[tuple[int, ...]] | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        image = None if self.image is None else change(self.image)
        return replace(self, clips=list(map(change, self.clips)), text=change(self.text), image=image)


def stock(variant: str, **changes) -> WanTransformer3DModel:
    """Stock diffusers with random weights, those of norms about 1.

    About 0 attention is uniform, and the gradients of its keys' biases nothing but rounding.
    """
    model = randomised(WanTransformer3DModel(**ARCHITECTURES[variant] | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def twin(model: WanTransformer3DModel) -> WanTransformer:
    """Ours with the same weights."""
    ours = WanTransformer(**{k: v for k, v in model.config.items() if not k.startswith("_")})
    ours.load_state_dict(model.state_dict())
    return ours.eval()


def batch_of(variant: str, sizes=SIZES, *, image_tokens=None, frames=None) -> Batch:
    rng = torch.Generator().manual_seed(1)
    architecture = ARCHITECTURES[variant]
    tokens = image_tokens or IMAGE_TOKENS.get(variant)
    times = torch.tensor([874.3, 12.7, 0.0, 999.0, 500.1])
    return Batch(
        clips=[torch.randn(architecture["in_channels"], *size, generator=rng) for size in sizes],
        timestep=times[: len(sizes) if frames is None else sum(map(len, frames))],
        text=torch.randn(len(sizes), 512, 32, generator=rng),
        image=torch.randn(len(sizes), tokens, 24, generator=rng) if tokens else None,
        frames=frames,
    )


def stock_alone(model: nn.Module, batch: Batch) -> list[Tensor]:
    """diffusers, one call for each clip; timesteps by token where a clip has several."""
    frames = batch.frames or [(clip.shape[1],) for clip in batch.clips]
    times, outputs = batch.timestep, []
    for index, (clip, counts) in enumerate(zip(batch.clips, frames, strict=True)):
        here, times = times[: len(counts)], times[len(counts) :]
        if len(counts) > 1:
            by_frame = here.repeat_interleave(torch.tensor(counts))
            here = by_frame.repeat_interleave(clip[0, 0].numel() // 4)[None]
        image = None if batch.image is None else batch.image[index : index + 1]
        if model.config.pos_embed_seq_len is not None:
            image = image.unflatten(1, (2, -1))[0]
        text = batch.text[index : index + 1]
        outputs.append(model(clip[None], here, text, image, return_dict=False)[0][0])
    return outputs


def through_clips(model: nn.Module, batch: Batch) -> list[Tensor]:
    return model(batch.clips, batch.timestep, batch.text, batch.image, segment_frames=batch.frames)


def through_tensor(model: nn.Module, batch: Batch) -> list[Tensor]:
    """One call as a pipeline makes it, for clips of one size without segments."""
    image = batch.image
    if model.config.pos_embed_seq_len is not None:
        image = image.unflatten(1, (2, -1)).flatten(0, 1)
    return list(model(torch.stack(batch.clips), batch.timestep, batch.text, image).sample)


def loss_of(outputs: list[Tensor]) -> Tensor:
    rng = torch.Generator().manual_seed(2)
    return sum((output * torch.randn(output.shape, generator=rng)).sum() for output in outputs)


def results(forward: Callable[[nn.Module, Batch], list[Tensor]], model: nn.Module, batch: Batch) -> dict:
    """Outputs, and the gradients of a loss for all that it depends on."""
    batch = batch.map(lambda tensor: tensor.clone().requires_grad_())
    model.zero_grad()
    outputs = forward(model, batch)
    loss_of(outputs).backward()
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"gradient of clip {index}": clip.grad for index, clip in enumerate(batch.clips)}
    images = {} if batch.image is None else {"gradient of the image": batch.image.grad}
    return found | {"gradient of the text": batch.text.grad} | images


def worst(found: dict, expected: dict) -> float:
    """The largest over tensors of max |difference| / max |value|."""
    assert found.keys() == expected.keys()
    assert all(tensor.any() for tensor in expected.values())  # nothing is compared with zeros
    return max(distance(found[key], expected[key]) for key in expected)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.fixture(params=ARCHITECTURES)
def variant(request):
    return request.param


# parity


def test_the_tensor_door_gives_diffusers_output_and_every_gradient(variant):
    model, batch = stock(variant), batch_of(variant, [(3, 8, 8)] * 2)
    expected = results(through_tensor, model, batch)
    assert worst(results(through_tensor, twin(model), batch), expected) <= TOLERANCE


def test_clips_of_any_sizes_in_one_stream_are_diffusers_calls_one_by_one(variant):
    model, batch = stock(variant), batch_of(variant)
    expected = results(stock_alone, model, batch)
    assert worst(results(through_clips, twin(model), batch), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "frames"), [(SIZES, [(1, 2), (1,), (2,)]), ([(3, 8, 8)] * 2, [(1, 2)] * 2)], ids=str
)
def test_segments_are_diffusers_timesteps_by_token(sizes, frames):
    model, batch = stock("ti2v"), batch_of("ti2v", sizes, frames=frames)
    expected = results(stock_alone, model, batch)
    assert worst(results(through_clips, twin(model), batch), expected) <= TOLERANCE


@pytest.mark.parametrize("values", [[0.0] * 16 + [640.5] * 32, range(48)], ids=["first frame", "all differ"])
def test_the_tensor_door_takes_timesteps_by_token(values):
    model, batch = stock("ti2v"), batch_of("ti2v", [(3, 8, 8)] * 2)
    batch.timestep = torch.tensor(values, dtype=torch.float32).expand(2, -1) + torch.tensor([[0.0], [9.0]])
    expected = results(through_tensor, model, batch)
    assert worst(results(through_tensor, twin(model), batch), expected) <= TOLERANCE


def test_rope_of_released_head_widths_over_long_axes_is_diffusers():
    changes = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 128}
    model = stock("t2v", **changes)
    batch = batch_of("t2v", [(9, 12, 22), (2, 30, 4)])
    expected = results(stock_alone, model, batch)
    assert worst(results(through_clips, twin(model), batch), expected) <= TOLERANCE


@pytest.mark.parametrize("tokens", [7, 600])
def test_any_count_of_image_tokens_is_told_from_the_text(tokens):
    model, batch = stock("i2v"), batch_of("i2v", image_tokens=tokens)
    expected = results(stock_alone, model, batch)
    assert worst(results(through_clips, twin(model), batch), expected) <= TOLERANCE


def test_what_diffusers_returns_is_returned():
    model, batch = twin(stock("t2v")), batch_of("t2v", SIZES[:1])
    arguments = torch.stack(batch.clips), batch.timestep, batch.text
    (plain,) = model(*arguments, return_dict=False)
    assert torch.equal(plain, model(*arguments).sample)
    assert plain.shape == (1, 16, *SIZES[0])


# the comparison notices


def _swap_norms(monkeypatch, model, batch):
    for block in model.blocks:
        block.norm2, block.norm3 = block.norm3, block.norm2


def _round_timestep(monkeypatch, model, batch):
    exact = transformer.sinusoid
    monkeypatch.setattr(
        transformer, "sinusoid", lambda timestep, *rest: exact(timestep.bfloat16().float(), *rest)
    )


def _images_last_frame_first(monkeypatch, model, batch):
    embed = transformer.ImageEmbedder.forward
    swapped = lambda self, image: embed(self, image.roll(257, dims=1))  # noqa: E731
    monkeypatch.setattr(transformer.ImageEmbedder, "forward", swapped)


def _one_softmax_for_text_and_image(monkeypatch, model, batch):
    def forward(self, x, text, image, clip_tokens, attend):
        key = torch.cat([self.norm_k(self.to_k(text)), self.norm_added_k(self.add_k_proj(image))], dim=1)
        value = torch.cat([self.to_v(text), self.add_v_proj(image)], dim=1)
        return self.to_out[0](self._attend(self.norm_q(self.to_q(x)), key, value, clip_tokens, attend))

    monkeypatch.setattr(attention.CrossAttention, "forward", forward)


def _positions_run_on(monkeypatch, model, batch):
    rotation = transformer.rotation
    monkeypatch.setattr(transformer, "rotation", lambda *arguments: rotation(*arguments).roll(1, dims=0))


def _attend_across_clips(monkeypatch, model, batch):
    whole = lambda q, k, v, clip_tokens: attend_within_clips(q, k, v, [len(q)], [len(k)])  # noqa: E731
    monkeypatch.setattr(model.sequence, "attend", whole, raising=False)


def _norm_by_head(monkeypatch, model, batch):
    def forward(self, x):
        heads = x.unflatten(-1, (4, -1))
        return F.rms_norm(heads, heads.shape[-1:], eps=self.eps).flatten(-2) * self.weight

    monkeypatch.setattr(attention.RMSNorm, "forward", forward)


def _last_segment_first(monkeypatch, model, batch):
    batch.timestep = batch.timestep.flip(0)


@pytest.mark.parametrize(
    ("mutate", "variant"),
    [
        (_swap_norms, "t2v"),
        (_round_timestep, "t2v"),
        (_images_last_frame_first, "flf2v"),
        (_one_softmax_for_text_and_image, "i2v"),
        (_positions_run_on, "t2v"),
        (_attend_across_clips, "t2v"),
        (_norm_by_head, "t2v"),
        (_last_segment_first, "ti2v"),
    ],
)
def test_a_mistake_fails_the_comparison(monkeypatch, mutate, variant):
    model = stock(variant)
    batch = batch_of(variant, frames=[(1, 2), (1,), (2,)] if variant == "ti2v" else None)
    with torch.no_grad():
        expected = stock_alone(model, batch)
        ours = twin(model)
        mutate(monkeypatch, ours, batch)
        found = through_clips(ours, batch)
    assert max(map(distance, found, expected)) > 100 * TOLERANCE


# precision


@pytest.mark.parametrize(("variant", "frames"), [("flf2v", None), ("ti2v", [(1, 2), (1,), (2,)])])
def test_a_float64_model_is_float64_throughout(variant, frames):
    """The gradient against a difference quotient: one float32 operation would be off by 1e-7 / step."""
    step = 1e-5
    model, batch = twin(stock(variant)).double(), batch_of(variant, frames=frames).map(Tensor.double)
    seen = set()
    for module in model.modules():
        module.register_forward_hook(lambda m, args, out: seen.update(_dtypes((args, out))))
    gradients = results(through_clips, model, replace(batch, timestep=batch.timestep.double()))
    assert seen == {torch.float64}

    rng = torch.Generator().manual_seed(4)
    direction = {
        name: torch.randn(p.shape, generator=rng, dtype=p.dtype) for name, p in model.named_parameters()
    }
    along = sum((gradients[f"gradient of {name}"] * v).sum() for name, v in direction.items())
    losses = []
    with torch.no_grad():
        for change in (step, -2 * step):  # to +step, and from there to -step
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=change)
            losses.append(loss_of(through_clips(model, batch)))
    assert ((losses[0] - losses[1]) / (2 * step)).item() == pytest.approx(along.item(), rel=1e-6)


def _dtypes(value) -> set[torch.dtype]:
    if isinstance(value, Tensor):
        return {value.dtype.to_real()}
    return set().union(*map(_dtypes, value)) if isinstance(value, (tuple, list)) else set()


def _watched(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What modules gave in one forward of clips, by name, and a block's modulation."""
    seen = {}

    def note(name, module, args, out):
        seen[name] = out
        if isinstance(module, transformer.WanTransformerBlock):
            seen["modulation"] = args[3]

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in model.named_modules()]
    with torch.no_grad():
        through_clips(model, batch)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_time_modulation_norms_and_rope_stay_float32_under_autocast_and_in_bfloat16(weights):
    model = stock("i2v").to(weights).float()
    ours, batch = twin(model).to(weights), batch_of("i2v")
    exact = _watched(twin(model), batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        seen = _watched(ours, batch)
    check_rope(ours)
    assert ours.rope.freqs_cos.dtype == torch.float32
    embedder = "condition_embedder"
    for name in (f"{embedder}.time_embedder.linear_1", f"{embedder}.time_embedder", f"{embedder}.time_proj"):
        assert torch.equal(seen[name], exact[name])
    assert torch.equal(seen["modulation"], exact["modulation"])
    wide = ("norm1", "norm3", "attn1.norm_q", "attn1.norm_k", "attn2.norm_q", "attn2.norm_added_k")
    assert all(seen[f"blocks.1.{name}"].dtype == torch.float32 for name in wide)
    assert seen["blocks.1"].dtype == seen["proj_out"].dtype == torch.bfloat16  # as in diffusers
    assert distance(seen[""].float(), exact[""]) < 0.03  # bfloat16 has 8 bits


def test_blocks_modulate_and_add_in_float32_whatever_the_stream_is(monkeypatch):
    """The branch that is added may be bfloat16; what it is added to, and every modulation, is not."""
    seen = {"_modulate": set(), "_add_gated": set()}

    def watch(name):
        function = getattr(transformer, name)

        def watched(*tensors):
            branch = name == "_add_gated"
            seen[name] |= {tensor.dtype for at, tensor in enumerate(tensors) if not (branch and at == 1)}
            return function(*tensors)

        monkeypatch.setattr(transformer, name, watched)

    watch("_modulate")
    watch("_add_gated")
    model, batch = twin(stock("flf2v")).bfloat16(), batch_of("flf2v")
    entered = {}
    model.condition_embedder.image_embedder.norm1.register_forward_hook(
        lambda module, args, out: entered.update(image=args[0].dtype)
    )
    with torch.no_grad():
        through_clips(model, batch)
    assert seen == {"_modulate": {torch.float32}, "_add_gated": {torch.float32}}
    assert entered == {"image": torch.float32}  # CLIP's numbers are not rounded before their norm


def test_the_longest_grid_is_that_of_the_tables_and_no_longer():
    model = twin(stock("t2v"))
    text, timestep = torch.zeros(1, 512, 32), torch.zeros(1)
    with torch.no_grad():
        assert model([torch.zeros(16, 1, 2, 2048)], timestep, text)[0].shape == (16, 1, 2, 2048)
        with pytest.raises(ValueError, match="1025 tokens along an axis"):
            model([torch.zeros(16, 1, 2, 2050)], timestep, text)
    assert model._cp_plan is None


def test_tokens_that_no_clip_owns_are_refused():
    x = torch.zeros(8, 2, 4)
    for queries, keys in (([4, 4], [8]), ([3, 3], [3, 3]), ([8], [4, 4])):
        with pytest.raises(ValueError, match="tokens"):
            attend_within_clips(x, x, x, queries, keys)


def test_neighbouring_timesteps_stay_apart_in_bfloat16():
    model, batch = twin(stock("t2v")).bfloat16(), batch_of("t2v")
    batch.timestep = torch.tensor([874.0, 875.0, 999.0])  # in bfloat16 872, 876 and 1000
    angles = batch.timestep[:, None].double() * 10000 ** (-torch.arange(16) / 16)
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    first = model.condition_embedder.time_embedder.linear_1
    seen = {}
    first.register_forward_hook(lambda m, args, out: seen.update(sinusoid=args[0]))
    with torch.no_grad():
        through_clips(model, batch)
    # float32 angles up to 999 are off by up to 2^-14 each
    torch.testing.assert_close(seen["sinusoid"].double(), expected, rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match="timestep is torch.bfloat16, which rounds 875 to 876"):
        through_clips(model, replace(batch, timestep=batch.timestep.bfloat16()))
    with pytest.raises(ValueError, match="timestep is torch.float16"):
        through_clips(model, replace(batch, timestep=batch.timestep.half()))


# memory


def saved_bytes(forward: Callable[[], object]) -> tuple[int, int]:
    """What autograd keeps of a forward: all bytes, each storage once, and those of the largest storage."""
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = forward()  # the storages live while their addresses are counted
    del kept
    return sum(storages.values()), max(storages.values())


def test_modulation_takes_no_memory_by_token():
    width, model = 48, stock("ti2v", num_layers=1)
    ours = twin(model)

    def measure(frames_of_tokens):
        """Bytes by token that grow as a clip's height doubles, and the largest storage's."""
        (low, _), (high, largest) = (
            saved_bytes(partial(frames_of_tokens, batch_of("ti2v", [(3, height, 32)], frames=[(1, 2)])))
            for height in (32, 64)
        )
        return (high - low) / (3 * 16 * 16), largest / (3 * 32 * 16)

    def segments(batch):
        return through_clips(ours, batch)

    def one(batch):
        return through_clips(ours, replace(batch, timestep=batch.timestep[:1], frames=None))

    segmented, largest = measure(segments)
    diffusers, largest_of_diffusers = measure(partial(stock_alone, model))
    assert segmented == measure(one)[0]
    assert largest < 4 * 6 * width  # bytes: no six vectors of the model's width by token
    assert largest_of_diffusers >= 4 * 6 * width
    assert diffusers - segmented >= 4 * 6 * width


def test_checkpointed_blocks_give_the_same_gradients():
    model, batch = twin(stock("flf2v")), batch_of("flf2v")
    plain, kept = results(through_clips, model, batch), saved_bytes(partial(through_clips, model, batch))
    model.enable_gradient_checkpointing()
    again = results(through_clips, model, batch)
    assert all(torch.equal(again[key], plain[key]) for key in plain)
    assert saved_bytes(partial(through_clips, model, batch))[0] < kept[0] / 2


# independence


@pytest.mark.parametrize("sizes", [SIZES, [(2, 4, 4)] * 3], ids=["mixed", "equal"])
def test_a_clip_depends_on_nothing_of_another(sizes):
    model, batch = twin(stock("i2v")), batch_of("i2v", sizes)
    batch = batch.map(lambda tensor: tensor.requires_grad_())
    times = batch.timestep.requires_grad_()
    for index, output in enumerate(through_clips(model, batch)):
        whole = [batch.text, batch.image, times]
        gradients = torch.autograd.grad(output.square().sum(), [*batch.clips, *whole], retain_graph=True)
        for other in range(3):
            parts = [gradients[other], *(gradient[other] for gradient in gradients[3:])]
            assert all(part.any() == (other == index) for part in parts)


# what is refused


def _refused(variant, message, **changes):
    return pytest.param(variant, changes, message, id=message[:40])


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        _refused("t2v", r"text \[3, 226, 32\], not \[3, 512, 32\]", text=torch.zeros(3, 226, 32)),
        _refused("t2v", r"text \[2, 512, 32\], not \[3, 512, 32\]", text=torch.zeros(2, 512, 32)),
        _refused("t2v", r"timestep \[2\]: each of the 3 segments", timestep=torch.zeros(2)),
        _refused("t2v", "does not attend to images", image=torch.zeros(3, 257, 24)),
        _refused("t2v", r"a clip of shape \[36, 3, 8, 8\]: .* \[16,", clips=batch_of("i2v").clips),
        _refused("t2v", "latents of 3 frames, 7x8", clips=[torch.zeros(16, 3, 7, 8)] * 3),
        _refused("t2v", "segment_frames of 2 clips", frames=[(3,), (1,)]),
        _refused("t2v", "1025 tokens along an axis", clips=[torch.zeros(16, 1, 2, 2050)] * 3),
        _refused("i2v", r"attends to images \(image_dim=24\) and was given none", image=None),
        _refused("i2v", r"embeddings \[2, 257, 24\], not \[3, 257, 24\]", image=torch.zeros(2, 257, 24)),
        _refused("i2v", r"embeddings \[3, 257, 8\], not", image=torch.zeros(3, 257, 8)),
        _refused("i2v", r"embeddings \[3, 0, 24\]", image=torch.zeros(3, 0, 24)),
        _refused("flf2v", r"\[3, 257, 24\], not \[3, 514, 24\]", image=torch.zeros(3, 257, 24)),
        _refused("flf2v", r"\[6, 256, 24\], not \[3, 514, 24\]", image=torch.zeros(6, 256, 24)),
    ],
)
def test_inputs_that_do_not_add_up_are_refused(variant, changes, message):
    with pytest.raises(ValueError, match=message):
        through_clips(twin(stock(variant)), replace(batch_of(variant), **changes))


def test_a_tensor_has_segments_by_one_timestep_for_each_token_alone():
    model, batch = twin(stock("ti2v")), batch_of("ti2v", SIZES[:1])
    batch.timestep = torch.zeros(1, 47)
    with pytest.raises(ValueError, match=r"timestep \[1, 47\], not \[1, 48\]: one for each token"):
        through_tensor(model, batch)
    with pytest.raises(ValueError, match="segment_frames and local are for clips"):
        model(torch.stack(batch.clips), batch.timestep, batch.text, segment_frames=[(1, 2)])


def test_half_an_image_model_is_refused():
    with pytest.raises(ValueError, match="image_dim=24, added_kv_proj_dim=None"):
        WanTransformer(**ARCHITECTURES["t2v"], image_dim=24)


# diffusers' and PEFT's tools


def test_diffusers_opens_what_we_save_and_we_what_it_saves(tmp_path, variant):
    model = stock(variant)
    twin(model).save_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config == json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel"
    opened = [
        WanTransformer3DModel.from_pretrained(tmp_path / "ours"),
        WanTransformer.from_pretrained(tmp_path / "theirs"),
    ]
    check_rope(opened[1])
    for other in opened:
        state = other.state_dict()
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    batch = batch_of(variant)
    with torch.no_grad():
        found, expected = through_clips(opened[1], batch), stock_alone(model, batch)
    assert max(map(distance, found, expected)) <= TOLERANCE


def test_lora_of_every_kind_of_layer_is_diffusers():
    model, batch = stock("i2v"), batch_of("i2v", [(3, 8, 8)] * 2)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "net.0.proj", "net.2"]
    targets += ["patch_embedding", "proj_out", "time_proj", "linear_1"]
    ours = twin(model)
    for network in (model, ours):
        network.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    adapter = {name: p for name, p in model.named_parameters() if "lora" in name}
    for parameter in adapter.values():
        nn.init.normal_(parameter, std=0.15)
    assert len({name.split(".lora")[0] for name in adapter}) == 2 * 12 + 7
    ours.load_state_dict(model.state_dict())

    gradients = []
    for network in (model, ours):
        outputs = through_tensor(network, batch)
        loss_of(outputs).backward()
        named = dict(network.named_parameters())
        gradients.append({n: p.grad for n, p in named.items() if p.requires_grad})
        assert gradients[-1].keys() == adapter.keys()
        gradients[-1]["output"] = torch.stack(outputs).detach()
    assert worst(gradients[1], gradients[0]) <= TOLERANCE

    half = {"attention_kwargs": {"scale": 0.5}, "return_dict": False}
    arguments = torch.stack(batch.clips), batch.timestep, batch.text, batch.image
    with torch.no_grad():
        (expected,), (found,) = model(*arguments, **half), ours(*arguments, **half)
    assert distance(found, expected) <= TOLERANCE
    assert distance(expected, gradients[0]["output"]) > 0.01


# RoPE's tables


def test_the_tables_are_diffusers_and_follow_no_cast_below_float32():
    model = twin(stock("t2v", attention_head_dim=128))
    fresh = WanRotaryPosEmbed(128, (1, 2, 2), 1024)
    for changed in (model, model.bfloat16(), model.double().float()):
        reset_rope(changed, "cpu")
        check_rope(changed)
        assert torch.equal(changed.rope.freqs_cos, fresh.freqs_cos)
        assert torch.equal(changed.rope.freqs_sin, fresh.freqs_sin)


def test_a_model_from_the_meta_device_gets_its_tables():
    with torch.device("meta"):
        model = WanTransformer(**ARCHITECTURES["t2v"])
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with pytest.raises(ValueError, match="rope.freqs_cos is on the meta device"):
        check_rope(model)
    reset_rope(model, "cpu")
    check_rope(model)


def test_tables_that_were_ruined_are_found():
    model = twin(stock("t2v"))
    model.rope.freqs_sin = model.rope.freqs_sin.bfloat16().float()  # what zero.Init leaves of them
    with pytest.raises(ValueError, match=r"rope.freqs_sin \(torch.float32\) is wrong by up to 0.0"):
        check_rope(model)
    model.rope.freqs_sin = model.rope.fresh()[1].bfloat16()
    with pytest.raises(ValueError, match=r"rope.freqs_sin \(torch.bfloat16\) is wrong"):
        check_rope(model)


# ranks


class GatheringSequence(WholeSequence):
    """The stream over all ranks by the plainest means: every rank gathers all keys and values."""

    def bounds(self, tokens):
        length = -(-tokens // dist.get_world_size())
        return dist.get_rank() * length, (dist.get_rank() + 1) * length

    def split(self, stream):
        start, stop = self.bounds(len(stream))
        padding = stream.new_zeros(stop * dist.get_world_size(), *stream.shape[1:])
        return torch.cat([stream, padding])[start:stop]

    def attend(self, query, key, value, clip_tokens):
        tokens = sum(clip_tokens)
        start, stop = self.bounds(tokens)
        key, value = (_all_of(tensor)[:tokens] for tensor in (key, value))
        clip = torch.arange(len(clip_tokens)).repeat_interleave(torch.tensor(clip_tokens))
        own = clip[torch.arange(start, stop).clamp(max=tokens - 1)]
        q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, own[:, None] == clip).transpose(0, 1)

    def gather(self, stream, tokens):
        pieces = [torch.empty_like(stream) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, stream.detach().contiguous())
        pieces[dist.get_rank()] = stream  # gradients of this rank's tokens alone
        return torch.cat(pieces)[:tokens]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, tensor.contiguous())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


_all_of = _Gather.apply


def _split_stream(model: WanTransformer, batch: Batch) -> tuple[tuple, dict]:
    """On every rank: what it holds, and results with gradients summed over ranks."""
    model.sequence = GatheringSequence()
    parts = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: parts.append(args[5]))
    found = results(through_clips, model, batch)
    for key, tensor in found.items():
        if key.startswith("gradient"):
            dist.all_reduce(tensor)
    part = parts[0]
    return (part.first_clip, part.clip_tokens, part.first_segment, part.segment_tokens), found


def test_a_stream_split_over_two_ranks_is_that_of_one(world2):
    """Rank 0 holds nothing of the last clip, rank 1 nothing of the first segment, and padding as well."""
    model = stock("i2v")
    batch = batch_of("i2v", [(3, 4, 8), (1, 2, 6), (1, 4, 4)], frames=[(1, 2), (1,), (1,)])
    expected = results(stock_alone, model, batch)
    (first, one), (second, other) = world2.run(_split_stream, twin(model), batch)
    assert first == (0, (16,), 0, (8, 8))
    assert second == (0, (8, 3, 5), 1, (8, 3, 5))  # 31 tokens: one of the last five is padding
    assert worst(one, expected) <= TOLERANCE
    assert worst(other, expected) <= TOLERANCE


def _zero3_gradients(model: WanTransformer, batches: list[Batch]) -> tuple[dict, dict, int]:
    """Gradients under ZeRO-3, without and with checkpointing, and calls beyond the first of a module."""
    from tests.training.tiny import ZERO
    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine
    from wan_ds.training.precision import Precision

    engine = Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        Mesh(),
        zero_optimization=dict(ZERO[3]),
        micro_batch_size=1,
        max_grad_norm=0.0,
        precision=Precision(),
    )
    calls = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(lambda m, args, out, name=name: calls.append(name))

    def window():
        gradients = {}
        engine.before_update = lambda: gradients.update(
            (f"gradient of {name}", engine.full_gradient(parameter).clone())
            for name, parameter in engine.parameters()
        )
        engine.backward(loss_of(through_clips(engine.train, batches[dist.get_rank()])))
        engine.step(0.0)
        return gradients

    plain, repeated = window(), len(calls) - len(set(calls))
    model.enable_gradient_checkpointing()
    return plain, window(), repeated


def test_zero3_ranks_with_other_clips_and_segments_give_one_processs_gradient(world2):
    model = stock("i2v").train()
    one, many = batch_of("i2v", [(2, 8, 6)]), batch_of("i2v", frames=[(1, 2), (1,), (1, 1)])
    expected = [results(stock_alone, model, batch) for batch in (one, many)]
    names = [f"gradient of {name}" for name, _ in model.named_parameters()]
    summed = {name: expected[0][name] + expected[1][name] for name in names}
    for plain, checkpointed, repeated in world2.run(_zero3_gradients, twin(model).train(), [one, many]):
        assert repeated == 0
        assert worst(plain, summed) <= TOLERANCE
        assert worst(checkpointed, summed) <= TOLERANCE
