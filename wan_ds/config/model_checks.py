"""What the settings of a model must fulfil: its experts, its architecture, and what it is conditioned on."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from wan_ds.config import targets
from wan_ds.config.foreign_keys import TRANSFORMER_COUNTS, TRANSFORMER_KEYS
from wan_ds.config.nearest import suggest
from wan_ds.config.rules import counted, is_count, listed, require, shown
from wan_ds.config.schema import Config, Policy
from wan_ds.errors import ConfigError

EXPERTS = ("high_noise", "low_noise")


def check_model(config: Config) -> None:
    """Refuse experts, an architecture, images or a routing that do not fit each other."""
    model, names = config.model, list(config.model.experts)
    if set(names) not in ({"all"}, set(EXPERTS)):
        raise ConfigError(f"model.experts={listed(names)}: must be all alone, or high_noise and low_noise")
    if names == ["all"] and model.boundary is not None:
        raise ConfigError(
            f"model.boundary={model.boundary}: {model.name} has one expert, all; type model.boundary=null"
        )
    if names != ["all"] and (model.boundary is None or not 0 < model.boundary < 1):
        raise ConfigError(
            f"model.boundary={shown(model.boundary)}: must lie between 0 and 1, where two experts meet; "
            "Wan 2.2 has 0.875 (text to video) and 0.9 (image to video)"
        )
    _check_experts_of("model.guidance", model.guidance, names, complete=True)
    for key, guidance in (
        ("model.guidance", model.guidance),
        ("sampling.guidance", config.sampling.guidance),
    ):
        _check_guidance(key, guidance, names)
    _check_experts_of("train.lr_scale", config.train.lr_scale, names)
    for name, factor in config.train.lr_scale.items():
        rule = "greater than 0; an expert that is left out of train.experts stays as it is"
        require(factor > 0, f"train.lr_scale.{name}", factor, rule)
    trained = config.train.experts
    if trained is not None:
        _check_experts_of("train.experts", trained, names)
        rule = f"each expert that trains, once, of {listed(names)}; null for all"
        require(0 < len(trained) == len(set(trained)), "train.experts", listed(trained), rule)
    _check_frozen(config, names)
    _check_alone(config, names)
    _check_policy(config, names)
    for component in ("vae", "text_encoder", "tokenizer"):
        rule = "a folder, or a subfolder of model.path: only experts may start from random numbers"
        require(getattr(model, component).weights is not None, f"model.{component}.weights", "null", rule)
    _check_transformer(model.transformer)
    _check_images(config)


def _check_policy(config: Config, names: list[str]) -> None:
    """What a policy needs is there, and what it does not know is not."""
    routing, key = config.train.routing, "train.routing"
    policy, share, length = routing.policy, routing.high_noise_share, routing.run_length
    if policy in (Policy.fixed, Policy.alternate) and len(config.train.experts or names) < 2:
        raise ConfigError(
            f"{key}.policy={policy.name}: chooses between two experts, and one trains; leave it out"
        )
    if policy is Policy.fixed:
        rule = "between 0 and 1, the high-noise expert's share of the steps"
        require(share is not None and 0 < share < 1, f"{key}.high_noise_share", share, rule)
    if policy is Policy.alternate:
        rule = "a whole number from 1, how many steps an expert takes before it is the other's turn"
        require(length is not None and length > 0, f"{key}.run_length", length, rule)
    for name, value, owner in (
        ("high_noise_share", share, Policy.fixed),
        ("run_length", length, Policy.alternate),
    ):
        if value is not None and policy is not owner:
            raise ConfigError(
                f"{key}.{name}={value}: does nothing under {key}.policy={policy.name}; "
                f"type {key}.policy={owner.name}, or leave it out"
            )


def _check_images(config: Config) -> None:
    """Conditioning, architecture and encoders tell of the same kind of model."""
    model, transformer = config.model, config.model.transformer
    targets.refuse_misfits("model.conditioning", model.conditioning)
    kind = targets.find("model.conditioning", model.conditioning["_target_"])
    needed = ("in_channels", "images", "images_optional", "least_frames")
    lacking = [name for name in needed if not hasattr(kind, name)]
    if lacking:
        raise ConfigError(
            f"model.conditioning._target_={model.conditioning['_target_']}: lacks {', '.join(lacking)}; "
            "wan_ds.models.conditioning.Conditioning says what such a class must have"
        )
    wanted = kind.in_channels(transformer["out_channels"])
    require(
        transformer["in_channels"] == wanted,
        "model.transformer.in_channels",
        transformer["in_channels"],
        f"{wanted} for {kind.__name__} with {transformer['out_channels']} channels of latents; "
        f"another kind of model needs another model.conditioning",
    )
    targets.refuse_values("model.conditioning", model.conditioning)
    frames = transformer["patch_size"][0]
    if kind.images_optional and frames != 1:
        raise ConfigError(
            f"model.transformer.patch_size={transformer['patch_size']}: {kind.__name__} gives the first "
            f"latent frame alone, and a patch has {frames}; type model.transformer.patch_size=[1,2,2]"
        )
    has_clip, encoder = transformer.get("image_dim") is not None, model.image_encoder.weights
    if has_clip and encoder is None:
        raise ConfigError(
            f"model.image_encoder.weights=null: {model.name} has an image_dim, so it needs CLIP; "
            "type model.image_encoder.weights=image_encoder"
        )
    if not has_clip and encoder is not None:
        raise ConfigError(
            f"model.image_encoder.weights={encoder}: {model.name} has no image_dim, so it looks at no CLIP; "
            "type model.image_encoder.weights=null"
        )
    if has_clip and kind.images == 0:
        raise ConfigError(
            f"model.transformer.image_dim={transformer['image_dim']}: {kind.__name__} has no images; "
            "type model.transformer.image_dim=null, or choose another model.conditioning"
        )
    _check_sampled_images(config, kind)


def _check_sampled_images(config: Config, kind: Any) -> None:
    sampling = config.sampling
    for name, place in (("images", 1), ("last_images", 2)):
        paths = getattr(sampling, name)
        if paths is None:
            continue
        if kind.images < place:
            raise ConfigError(f"sampling.{name}: {config.model.name} takes no such images; leave it out")
        count = len(sampling.prompts or [])
        if len(paths) != count:
            raise ConfigError(
                f"sampling.{name}: {counted(len(paths), 'image')} for {counted(count, 'prompt')} in "
                "sampling.prompts; name one for each"
            )
    needs = kind.images > 0 and not kind.images_optional
    if needs and sampling.prompts is not None:
        for name in ("images", "last_images")[: kind.images]:
            if getattr(sampling, name) is None:
                raise ConfigError(
                    f"sampling.{name}: not set, and {config.model.name} needs one for each of "
                    "sampling.prompts; name the files, or leave sampling.prompts out for those of the clips"
                )


def _check_frozen(config: Config, names: list[str]) -> None:
    """An expert trains, or is loaded beside the one that does, or is not built."""
    frozen = config.train.frozen_experts
    _check_experts_of("train.frozen_experts", frozen, names)
    both = sorted(set(frozen) & set(config.train.experts or names))
    if both:
        raise ConfigError(
            f"train.frozen_experts={listed(frozen)}: {both[0]} trains as well; "
            f"type train.experts=[{', '.join(name for name in names if name not in frozen)}]"
        )
    if len(set(frozen)) < len(frozen):
        raise ConfigError(f"train.frozen_experts={listed(frozen)}: names one twice")


def _check_alone(config: Config, names: list[str]) -> None:
    """What a run that does not train every expert cannot do while it trains."""
    absent = sorted(set(names) - set(config.train.experts or names) - set(config.train.frozen_experts))
    sampling = config.sampling
    if absent and (sampling.every_steps is not None or sampling.at_start):
        raise ConfigError(
            f"sampling.every_steps={shown(sampling.every_steps)}: a video needs every expert, and "
            f"{listed(absent)} is in neither train.experts nor train.frozen_experts; "
            "type sampling.every_steps=null sampling.at_start=false"
        )


def _check_transformer(transformer: dict[str, Any]) -> None:
    for key in transformer:
        if key not in TRANSFORMER_KEYS:
            hint = suggest(
                f"model.transformer.{key}", [f"model.transformer.{other}" for other in TRANSFORMER_KEYS]
            )
            raise ConfigError(f"model.transformer.{key}: WanTransformer3DModel takes no such argument{hint}")
    needed = "num_layers num_attention_heads attention_head_dim in_channels out_channels text_dim patch_size"
    for key in needed.split():
        if key not in transformer:
            raise ConfigError(f"model.transformer.{key}: not set; type model.transformer.{key}=...")
    patch = transformer["patch_size"]
    whole = isinstance(patch, list) and all(is_count(size) for size in patch)
    rule = "three whole numbers (frames, height, width), such as [1,2,2]"
    require(whole and len(patch) == 3, "model.transformer.patch_size", patch, rule)
    for key, value in transformer.items():
        if key in TRANSFORMER_COUNTS:
            require(is_count(value), f"model.transformer.{key}", value, "a whole number from 1")


def _check_guidance(key: str, guidance: Any, names: list[str]) -> None:
    if isinstance(guidance, dict):
        _check_experts_of(key, guidance, names, complete=True)
    numbers = guidance.values() if isinstance(guidance, dict) else [guidance]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"{key}={guidance}: must be a number, or one by expert such as {{{names[0]}: 4.0}}")
    if not all(number >= 1 for number in numbers):
        raise ConfigError(f"{key}={guidance}: must be at least 1, which is no guidance")


def _check_experts_of(key: str, given: Iterable[str], names: list[str], complete: bool = False) -> None:
    given = list(given)
    for name in given:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key}: {name} is no expert of the model; {hint}there are {', '.join(names)}")
    for name in names if complete else ():
        if name not in given:
            raise ConfigError(f"{key}.{name}: not set; every expert of the model needs a number there")
