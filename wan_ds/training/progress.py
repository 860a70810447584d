"""What a run measures and shows of itself while it trains: validation losses and videos."""

from contextlib import ExitStack
from pathlib import Path

import torch

from wan_ds.config import Config
from wan_ds.data.latents import Encoded
from wan_ds.errors import ConfigError
from wan_ds.models.encoders import decode_latents
from wan_ds.training import callbacks, checkpoint, evaluation, networks, parts, shots
from wan_ds.training.experts import Routing
from wan_ds.training.loop import Callback, Loop
from wan_ds.training.sampling import Sample, build_pipeline, generate, guidance_of, write_samples
from wan_ds.training.trackers import Trackers


def evaluation_levels(config: Config, routing: Routing) -> torch.Tensor:
    """The noise levels of validation; raises ConfigError if no expert that is loaded owns one of them."""
    count = config.evaluation.sigmas_per_clip
    sigmas = evaluation.levels(routing.timesteps, count)
    loaded = networks.loaded_experts(config)
    if not {routing.owner_of(sigma) for sigma in sigmas.tolist()} & set(loaded):
        raise ConfigError(
            f"evaluation.sigmas_per_clip={count}: none of these noise levels belongs to "
            f"{', '.join(loaded)}; choose more, or leave evaluation out"
        )
    return sigmas


def validation(
    config: Config, encoders: parts.Encoders, encoded: Encoded, routing: Routing
) -> list[Callback]:
    """The callback that measures the routed validation loss, if it is asked for."""
    wanted = config.evaluation
    if wanted.every_steps is None and not wanted.at_start:
        return []
    if wanted.path is not None:
        clips = parts.checked_clips(config, wanted.path)
        encoded = parts.encoded_of(config, clips, encoders, keep=True)
    sigmas, conditioning = evaluation_levels(config, routing), parts.conditioning_of(config)
    probes = evaluation.probes(min(wanted.clips, len(encoded.clips)), sigmas, routing.owner_of)

    def evaluate(loop: Loop) -> None:
        losses, networks = {}, loop.networks
        for name, routed in probes.items():
            if name not in networks:
                continue
            with networks[name].inference() as model:
                own = evaluation.probe_losses(
                    evaluation.share_of_rank(routed, loop.mesh.dp_rank, loop.mesh.dp_size),
                    sigmas,
                    encoded,
                    model,
                    conditioning,
                    seed=config.seed,
                    batch_size=config.train.micro_batch_size,
                    tokens=loop.objective.tokens,
                )
            losses[name] = evaluation.gathered(own, len(routed), loop.mesh.sp_size)
        loop.meters.add(loop.step, evaluation.summary(losses, probes, sigmas))

    return [callbacks.Periodic("evaluation", evaluate, wanted.every_steps, wanted.at_start)]


def sampling(
    config: Config, encoders: parts.Encoders, encoded: Encoded, trackers: Trackers
) -> list[Callback]:
    """The callback that writes videos while training, if it is asked for."""
    wanted = config.sampling
    if wanted.every_steps is None and not wanted.at_start:
        return []
    data, conditioning = config.data, parts.conditioning_of(config)
    guidance = guidance_of(wanted.guidance, list(config.model.experts))

    def write_videos(loop: Loop) -> None:
        made_from = shots.of_settings(
            wanted,
            encoded.clips[: callbacks.CLIPS_SAMPLED],
            conditioning,
            read=encoded.read,
            height=data.height,
            width=data.width,
        )
        prompts = [shot.prompt for shot in made_from]
        images = shots.images_of(made_from)
        with ExitStack() as stack:
            modules = {name: stack.enter_context(one.inference()) for name, one in loop.networks.items()}
            pipeline = build_pipeline(
                modules,
                boundary=config.model.boundary,
                shift=wanted.shift,
                vae=encoders.vae,
                images=len(images),
                expand_timesteps=conditioning.expand_timesteps,
                image_encoder=encoders.image,
            )
            made = generate(
                pipeline,
                encoders.text(prompts),
                encoders.text([""]),
                num_frames=data.num_frames,
                height=data.height,
                width=data.width,
                steps=wanted.steps,
                guidance=guidance,
                seeds=[wanted.seed] * len(prompts),
                **images,
            )
        if not loop.mesh.is_main:
            return
        loop.places.move("writing samples")
        name = checkpoint.folder_name(loop.step)
        samples = [
            Sample(
                shot.prompt,
                wanted.seed,
                wanted.steps,
                guidance,
                wanted.shift,
                made.expert_calls,
                name,
                **shot.sources,
            )
            for shot in made_from
        ]
        target = Path(config.run_dir) / "samples" / name
        videos = list(decode_latents(encoders.vae, made.latents).cpu())
        write_samples(target, samples, videos, [None] * len(videos), data.fps)
        trackers.media(loop.step, {"samples": target / "contact.png"})

    return [callbacks.Periodic("sampling", write_videos, wanted.every_steps, wanted.at_start)]
