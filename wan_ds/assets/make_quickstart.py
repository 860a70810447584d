"""Make the quickstart's VAE, text encoder and tokenizer from a seed and three sample videos.

    python -m wan_ds.assets.make_quickstart [target folder]

The VAE is trained here, on one CPU core; the text encoder keeps its random weights.

Letters: B clips, F frames, H height, W width in pixels; f, h, w the same in latents (f = 1 + (F - 1) / 4,
h = H / 8, w = W / 8).
"""

import argparse
import copy
import json
import logging
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch.nn import functional
from tqdm import tqdm
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from wan_ds.data.clips import decode
from wan_ds.data.demo import SPANS, DemoClips, video_path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "quickstart"
SEED = 0

# The quickstart's clip.
NUM_FRAMES, FPS, HEIGHT, WIDTH = 9, 16, 64, 96

# The VAE: few channels where the pixels are many, so that a clip is encoded in a fraction of a second.
VAE_CONFIG = {"base_dim": 8, "dim_mult": [1, 3, 6, 6], "num_res_blocks": 1, "z_dim": 16}

WARMUP_STEPS, BETAS, EMA_DECAY = 50, (0.9, 0.98), 0.99
L1_WEIGHT = 0.2  # beside the mean square, in [-1, 1]: keeps edges
MOMENTS_WEIGHT = 0.002  # draws each latent channel to mean 0 and variance 1


@dataclass(frozen=True)
class Stage:
    """One part of the VAE's training; it starts from the weights that the one before it saved."""

    steps: int
    clips: int  # per step
    frames: int
    height: int
    width: int
    first_lr: float  # falls along a cosine to the last
    last_lr: float
    quickstart_share: float  # of the training clips; the rest are other spans, crops, scales and colours
    max_noise: float  # on latents, in deviations; a generated latent may well be off by 0.39


# A step on single pictures costs a fraction of one on clips and teaches all of space, so they come first.
STAGES = (
    Stage(1350, 8, 1, 32, 48, 2e-3, 2e-3, 0.5, 0.45),
    Stage(450, 4, 5, 32, 48, 2e-3, 6e-4, 0.75, 0.4),
    Stage(350, 3, 9, 32, 48, 1.5e-3, 3e-5, 0.85, 0.25),
)

# What the rest is cut from: the whole videos, larger and at three times the quickstart's rate.
POOL_STRIDE, POOL_HEIGHT, POOL_WIDTH = 3, 96, 144
POOL_SECONDS = {"bikes.mp4": 9.9, "bigbuckbunny.mp4": 5.2, "carphone_pristine.mp4": 3.9}

TEXT_CONFIG = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
# A random encoder averages over the caption and hardly mixes it into each token; with the values and outputs
# of its attention this much larger, every token (the closing one too) tells which caption it stands in.
ATTENTION_GAIN = 1.5

# Words of one piece; anything else in ASCII is spelled. Those of the demo captions are added.
COMMON_WORDS = """
a about above across after against air all along an and animal animals animated another are arm arms around
as at autumn away baby back background ball beach bear beautiful bed before behind below beside between
bicycle big bike bird birds black blue boat body book boy bright brown building buildings bus by calm camera
car cars cartoon cat chair child children city clear climbs close clothes cloud clouds coat cold colorful
colourful comes cooking cow crowd cup dances dancing dark day deep desert dog dogs door down dress drinks
drives drops dusk eats evening eye eyes face fall falls family fast field film fire fish flies floor flower
flowers flying food football forest four frame from front full garden girl girls glass glowing goes golden
grass gray green grey ground group guitar hair hand hands happy has hat he head her high hill hills his
holding holds home horse horses house houses ice in inside into is it its jacket jumping jumps kitchen lake
landscape large leaves left leg light lights lion little long looking looks low machine man many meadow men
misty moon morning motion motorcycle mountain mountains mouth moves moving music near next night no not
ocean of off old on one onto open opens orange out outside over paints panda paper park past path people
person piano picture pink plane plant plants playing plays portrait purple rabbit rain reading reads red
rides riding right river road robot rock rocks roof room running runs sand scene sea shirt shoes shot side
sings sits sitting sky sleeping sleeps slow slowly small smiles smoke snow soft space spring stairs standing
stands star stars stone stormy street suit summer sun sunlight sunny sunrise sunset swimming swims table
takes talking talks tall the their them then there they three through tiger to top towards town toy traffic
train tree trees truck turning turns two umbrella under up video view walking walks wall warm watches water
waterfall wave waves wearing wears white wide wild wind window windows winter with woman women wood wooden
woods words yellow young zoom
"""


def make_tokenizer(captions: list[str]) -> T5Tokenizer:
    """Make a unigram tokenizer of words, ASCII characters, `</s>` (id 1) and `<unk>` (id 2) for the rest."""
    words = {word.strip(string.punctuation) for caption in captions for word in caption.split()}
    words |= {"A", "An", "The", "Two", "In", *COMMON_WORDS.split()}
    pieces = sorted("▁" + word for word in words if len(word) > 1 or word in ("a", "A"))
    characters = string.digits + string.ascii_letters + string.punctuation
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(character, -5.0) for character in characters]
    vocab += [(piece, -3.0) for piece in pieces]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def make_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    """Make a umT5 encoder whose weights are random for good."""
    torch.manual_seed(SEED)
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=vocab_size, **TEXT_CONFIG)).eval()
    with torch.no_grad():
        for block in encoder.encoder.block:
            attention = block.layer[0].SelfAttention
            attention.v.weight.mul_(ATTENTION_GAIN)
            attention.o.weight.mul_(ATTENTION_GAIN)
    return encoder


class TrainingClips:
    """Draws clips `[B, 3, F, H, W]` in [-1, 1]: the quickstart's own, and others cut from the same videos."""

    def __init__(self, quickstart: torch.Tensor):
        self.quickstart = quickstart
        self.generator = torch.Generator().manual_seed(SEED)
        self.pool = []
        for video in tqdm(sorted({span.video for span in SPANS.values()}), desc="videos", disable=None):
            rate = FPS * POOL_STRIDE
            self.pool.append(
                decode(
                    video_path(video),
                    start_seconds=0.0,
                    num_frames=int(POOL_SECONDS[video] * rate),
                    fps=rate,
                    height=POOL_HEIGHT,
                    width=POOL_WIDTH,
                )
            )

    def draw(self, stage: Stage) -> torch.Tensor:
        """Return the clips of one step, `[B, 3, F, H, W]` of the stage."""
        first = self._integer(NUM_FRAMES - stage.frames + 1)
        return torch.stack([self._one(stage)[:, first : first + stage.frames] for _ in range(stage.clips)])

    def _one(self, stage: Stage) -> torch.Tensor:
        height, width = stage.height, stage.width
        if self._uniform() < stage.quickstart_share:
            clip = self.quickstart[self._integer(len(self.quickstart))]
            return self._crop(clip, height, width)
        video = self.pool[self._integer(len(self.pool))]
        stride = POOL_STRIDE - 1 + self._integer(3)
        start = self._integer(video.shape[1] - stride * (NUM_FRAMES - 1))
        clip = video[:, start : start + stride * (NUM_FRAMES - 1) + 1 : stride]
        scale = 1 + 0.5 * self._uniform()  # at 1.5 the largest clip takes the whole picture
        clip = self._crop(clip, int(height * scale), int(width * scale))
        clip = functional.interpolate(
            clip.transpose(0, 1), size=(height, width), mode="bilinear", antialias=True
        ).transpose(0, 1)
        return self._recolour(clip)

    def _crop(self, clip: torch.Tensor, height: int, width: int) -> torch.Tensor:
        top = self._integer(clip.shape[2] - height + 1)
        left = self._integer(clip.shape[3] - width + 1)
        return clip[:, :, top : top + height, left : left + width]

    def _recolour(self, clip: torch.Tensor) -> torch.Tensor:
        """Mirror half of the clips; permute the colours of a third; change contrast and brightness of all."""
        if self._uniform() < 0.5:
            clip = clip.flip(3)
        if self._uniform() < 1 / 3:
            clip = clip[torch.randperm(3, generator=self.generator)]
        contrast = 0.6 + 0.6 * self._uniform()
        brightness = 0.4 * (self._uniform() - 0.5)
        return (clip * contrast + brightness).clamp(-1, 1)

    def _uniform(self) -> float:
        return torch.rand((), generator=self.generator).item()

    def _integer(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.generator))


def quickstart_clips() -> torch.Tensor:
    """Return the three clips of the quickstart, `[3, 3, F, H, W]` in [-1, 1]."""
    clips = DemoClips()(None)
    return torch.stack(
        [
            decode(
                clip.path,
                start_seconds=clip.start_seconds,
                num_frames=NUM_FRAMES,
                fps=FPS,
                height=HEIGHT,
                width=WIDTH,
            )
            for clip in clips
        ]
    )


def reconstruct(vae: AutoencoderKLWan, pixels: torch.Tensor, max_noise: float, generator: torch.Generator):
    """Encode and decode `[B, 3, F, H, W]`, with noise; return that and the latents `[B, 16, f, h, w]`."""
    latents = vae.encode(pixels).latent_dist.mean
    level = max_noise * torch.rand(len(pixels), 1, 1, 1, 1, generator=generator)
    spread = latents.std(dim=(0, 2, 3, 4), keepdim=True).detach()
    noisy = latents + level * spread * torch.randn(latents.shape, generator=generator)
    return vae.decode(noisy).sample, latents


class LastTapConv(WanCausalConv3d):
    """A causal convolution of a single picture: only the last tap in time meets anything but padding."""

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve `[B, C, 1, h, w]`, a third of the general way's work."""
        assert cache_x is None and x.shape[2] == 1
        last_tap = self.weight[:, :, -1]
        return functional.conv2d(x[:, :, 0], last_tap, self.bias, padding=self._padding[0]).unsqueeze(2)


def see_pictures(vae: AutoencoderKLWan, pictures: bool) -> None:
    """Switch the VAE's causal convolutions to single pictures and back; the weights stay."""
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d):
            module.__class__ = LastTapConv if pictures else WanCausalConv3d


@torch.no_grad()
def start_as_pictures(vae: AutoencoderKLWan) -> None:
    """Make time trivial: convolutions see only the present, four frames become their mean and stay it."""
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3):
            module.weight[:, :, :-1] = 0
            module.weight[:, :, -1] *= math.sqrt(3)  # the fan-in is a third
        if isinstance(module, WanResample) and hasattr(module, "time_conv"):
            convolution = module.time_conv
            identity = torch.eye(convolution.in_channels)
            convolution.weight.zero_()
            convolution.bias.zero_()
            if module.mode == "downsample3d":
                convolution.weight[:, :, -2:, 0, 0] = identity[:, :, None] / 2
            else:
                convolution.weight[:, :, -1, 0, 0] = torch.cat([identity, identity])


def train_vae(stage: Stage, vae: AutoencoderKLWan, clips: TrainingClips) -> AutoencoderKLWan:
    """Train the VAE through one stage, on the CPU in fp32; return the moving average of its weights."""
    average = torch.optim.swa_utils.AveragedModel(
        vae, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA_DECAY)
    )
    see_pictures(vae, stage.frames == 1)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1.0, betas=BETAS)

    def lr(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
        return min(1.0, (step + 1) / WARMUP_STEPS) * (
            stage.last_lr + (stage.first_lr - stage.last_lr) * cosine
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr)
    progress = tqdm(range(stage.steps), desc=f"vae, frames: {stage.frames}", mininterval=5)
    for step in progress:
        pixels = clips.draw(stage)
        decoded, latents = reconstruct(vae, pixels, stage.max_noise, clips.generator)
        mean, variance = latents.mean(dim=(0, 2, 3, 4)), latents.var(dim=(0, 2, 3, 4))
        moments = (mean.square() + variance - variance.log() - 1).mean()
        loss = functional.mse_loss(decoded, pixels) + L1_WEIGHT * functional.l1_loss(decoded, pixels)
        optimizer.zero_grad()
        (loss + MOMENTS_WEIGHT * moments).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(vae)
        if step % 20 == 0:
            progress.set_postfix(psnr=f"{psnr(decoded, pixels):.2f}", moments=f"{moments.item():.3f}")
    return average.module


def make_vae(folder: Path, config: dict, stages: Sequence[Stage], done: int) -> None:
    """Train a VAE stage by stage, saving after each; the first `done` stages' result is in the folder."""
    quickstart = quickstart_clips()
    clips = TrainingClips(quickstart)
    for number, stage in enumerate(stages[done:], start=done):
        torch.manual_seed(SEED + number)
        clips.generator.manual_seed(SEED + number)
        if number == 0:
            vae = AutoencoderKLWan(**config)
            start_as_pictures(vae)
        else:
            vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32)
        save_vae(train_vae(stage, vae.train(), clips), quickstart, folder)


def psnr(decoded: torch.Tensor, pixels: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of pixels in [-1, 1]."""
    return -10 * math.log10(((decoded.clamp(-1, 1) - pixels) / 2).square().mean().item())


@torch.no_grad()
def psnr_per_clip(vae: AutoencoderKLWan, pixels: torch.Tensor) -> list[float]:
    """Return the reconstruction's PSNR in dB of each clip of `[B, 3, F, H, W]`."""
    return [psnr(vae.decode(vae.encode(clip[None]).latent_dist.mean).sample[0], clip) for clip in pixels]


@torch.no_grad()
def save_vae(vae: AutoencoderKLWan, pixels: torch.Tensor, folder: Path) -> None:
    """Save in bf16, with the statistics of the latents that the rounded weights make of `[B, 3, F, H, W]`."""
    shipped = copy.deepcopy(vae).to(torch.bfloat16)
    shipped.save_pretrained(folder)
    vae = AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32)
    latents = torch.cat([vae.encode(clip[None]).latent_dist.mean for clip in pixels])
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=_rounded(mean), latents_std=_rounded(std))
    vae.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)  # the folder it was loaded from, on this machine
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    logger.info("latents: mean %s, std %s", _rounded(mean), _rounded(std))
    psnrs = psnr_per_clip(vae.to(torch.float32), pixels)
    logger.info("quickstart PSNR of the saved weights: %s dB", [round(value, 2) for value in psnrs])


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def main() -> None:
    """Make the three folders in the target."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--text-only", action="store_true", help="leave the VAE that is there")
    parser.add_argument("--stages-done", type=int, default=0, help="go on from the VAE that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the order of sums, and so the result, depends on it

    tokenizer = make_tokenizer([span.caption for span in SPANS.values()])
    tokenizer.save_pretrained(arguments.target / "tokenizer")
    encoder = make_text_encoder(len(tokenizer))
    encoder.to(torch.bfloat16).save_pretrained(arguments.target / "text_encoder")
    if arguments.text_only:
        return
    make_vae(arguments.target / "vae", VAE_CONFIG, STAGES, arguments.stages_done)


if __name__ == "__main__":
    main()
