"""From settings to the networks of a run: what each starts from, its dtypes, its adapter and its engine."""

import logging
from pathlib import Path
from typing import Any

import torch

from wan_ds.config import Config, targets
from wan_ds.errors import CheckpointError
from wan_ds.flow.timesteps import Interval
from wan_ds.interop import lora
from wan_ds.interop.lora import Lora
from wan_ds.models.adapter import AdapterSettings
from wan_ds.models.attention import BACKENDS, TokenSequence, WholeSequence
from wan_ds.models.compilation import compile_blocks
from wan_ds.models.recompute import recompute
from wan_ds.models.transformer import WanTransformer
from wan_ds.models.weights import (
    Drawn,
    Source,
    build_transformer,
    count_parameters,
    on_meta,
    refuse_misfit,
)
from wan_ds.parallel.mesh import Mesh
from wan_ds.parallel.ulysses import SplitSequence
from wan_ds.training import adapters
from wan_ds.training.adapters import Adapter
from wan_ds.training.agreement import agreed, of_rank_0
from wan_ds.training.ema import Ema
from wan_ds.training.engine import Engine, FrozenEngine, partition_of
from wan_ds.training.guard import FirstSteps
from wan_ds.training.loop import Expert
from wan_ds.training.lr_schedule import Schedule
from wan_ds.training.optimizer import build_optimizer
from wan_ds.training.precision import Precision, named
from wan_ds.training.shards import shape_of, trainable
from wan_ds.training.sources import ByOneRank, Fingerprint, is_run, newest_of_run, transformer_source
from wan_ds.training.step import Tokens

log = logging.getLogger(__name__)


def loaded_experts(config: Config) -> list[str]:
    """The experts that are built: those that train, and the frozen ones beside them."""
    return [*(config.train.experts or config.model.experts), *config.train.frozen_experts]


def source_of(config: Config, expert: str) -> Source:
    """What an expert starts from, its names and shapes those of the model; raises CheckpointError."""
    model = on_meta(config.model.transformer)
    source = transformer_source(config.model.path, config.model.experts[expert].weights, expert)
    if source is None:
        return Drawn(model, config.seed, expert)
    refuse_misfit(model, source)
    return source


def adapter_settings(config: Config) -> AdapterSettings | None:
    """Shape and places of the adapters that train; None where all weights do."""
    adapter = config.adapter
    if adapter.rank is None:
        return None
    return AdapterSettings(
        rank=adapter.rank,
        alpha=float(adapter.rank if adapter.alpha is None else adapter.alpha),
        targets=list(adapter.targets),
        rslora=adapter.rslora,
        dropout=adapter.dropout,
        rank_pattern=dict(adapter.rank_pattern),
        alpha_pattern=dict(adapter.alpha_pattern),
    )


def adapter_of(config: Config, name: str, base: str | None) -> Adapter | None:
    """An expert's adapter as its file describes it; ``base``: what a person calls the model."""
    settings, model = adapter_settings(config), config.model
    if settings is None:
        return None
    said = {
        "expert": name,
        "boundary": model.boundary,
        "shift": model.shift,
        "base": base,
        "base_checkpoint": None if base is None else newest_of_run(base),
        "rank": settings.rank,
        "alpha": settings.alpha,
        "model": model.name,
    }
    return Adapter(settings, {key: str(value) for key, value in said.items() if value is not None})


def adapter_start(config: Config, name: str) -> Lora | None:
    """The adapter that an expert goes on from, a file's or a run's; None where it starts from the seed.

    Raises CheckpointError if it is another expert's or another architecture's.
    """
    path = config.adapter.init_from.get(name)
    if path is None:
        return None
    try:
        given = adapters.of_run(Path(path), name) if is_run(Path(path)) else lora.read(path)
        lora.refuse_swapped(given, name)
        lora.refuse_unfit(given, linear_shapes(config))
    except CheckpointError as error:
        raise CheckpointError(f"adapter.init_from.{name}={path}: {error}") from error
    return given


def linear_shapes(config: Config) -> lora.Shapes:
    """The sizes of the model's linear layers."""
    return lora.linear_shapes(dict(on_meta(config.model.transformer).named_parameters()))


def precision_of(config: Config) -> Precision:
    """What every parameter is stored in, and what is computed in."""
    chosen = config.precision
    names = (chosen.trainable_dtype, chosen.frozen_dtype, chosen.compute_dtype, chosen.frozen_storage)
    return named(*(None if one is None else one.name for one in names))


def tokens_of(config: Config, mesh: Mesh | None = None) -> Tokens:
    """How clips become this rank's tokens; without a mesh all tokens of a clip are in this process."""
    attention = BACKENDS[config.model.attention.name]
    if mesh is None or mesh.sp_size == 1:
        sequence: TokenSequence = WholeSequence(attention)
    else:
        sequence = SplitSequence(mesh, attention, config.parallelism.ulysses.name)
    return Tokens(tuple(config.model.transformer.get("patch_size", (1, 2, 2))), sequence)


def build_expert(  # noqa: PLR0913
    config: Config,
    name: str,
    interval: Interval,
    schedule: Schedule,
    mesh: Mesh,
    *,
    is_new: bool = True,
    base: str | None = None,
) -> Expert:
    """One expert that trains, its weights read or drawn, sharded over the mesh.

    ``is_new``: no checkpoint follows, so an adapter starts from `adapter.init_from`; ``base``: what a person
    calls the model, for the adapter's file.
    """
    precision, settings = precision_of(config), adapter_settings(config)
    zero_optimization = dict(config.parallelism.zero_optimization)
    source = agreed(lambda: source_of(config, name))
    witness = Fingerprint(source)
    model = build_transformer(
        config.model.transformer,
        ByOneRank(source if settings is None else witness),
        seed=config.seed,
        expert=name,
        dtype_of=precision.dtype_of,
        adapter=settings,
        init_from=agreed(lambda: adapter_start(config, name)) if is_new else None,
        frozen_storage=precision.frozen_storage,
        partition=partition_of(zero_optimization),
    )
    arrange(config, model, mesh)
    parameters = count_parameters(model)
    engine = Engine(
        model.train(),
        build_optimizer(model, targets.bind("optimizer", config.optimizer)),
        mesh,
        zero_optimization=zero_optimization,
        micro_batch_size=config.train.micro_batch_size,
        max_grad_norm=config.train.max_grad_norm,
        precision=precision,
    )
    trained = sum(torch.Size(shape_of(p)).numel() for _, p in trainable(engine))
    log.info(
        "%s: %.2f M parameters, %.2f M of them train, %d steps planned",
        name,
        parameters / 1e6,
        trained / 1e6,
        schedule.steps,
    )
    return Expert(
        name=name,
        interval=interval,
        engine=engine,
        schedule=schedule,
        base_lr=config.optimizer["lr"] * config.train.lr_scale.get(name, 1.0),
        guard=FirstSteps(name, engine),
        adapter=adapter_of(config, name, base),
        base=None if settings is None else of_rank_0(witness.value),
        base_source=source.where,
        ema=None if config.ema.decay is None else Ema(engine, config.ema.decay),
    )


def arrange(config: Config, model: WanTransformer, mesh: Mesh) -> None:
    """How the model computes in training: over which ranks, what again in backward, what compiled."""
    parallelism = config.parallelism
    model.sequence = tokens_of(config, mesh).sequence
    recompute(
        model,
        parallelism.recompute.name,
        keep_exchange=parallelism.recompute_keeps_exchange,
        keep_ffn=parallelism.recompute_keeps_ffn,
    )
    if config.train.compile.name == "blocks":
        compile_blocks(model)
    if config.adapter.rank is not None:
        model.patch_embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:  # noqa: ARG001
    """Let gradients reach the first block's input.

    Where no input has one, ZeRO-3 takes a block's backward for done when it begins, and lets its weights go.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


def build_frozen(config: Config, name: str, mesh: Mesh) -> FrozenEngine:
    """One expert that does not train, sharded over the mesh, for evaluation and sampling."""
    precision = precision_of(config)
    zero_optimization = dict(config.parallelism.zero_optimization)
    model = build_transformer(
        config.model.transformer,
        ByOneRank(agreed(lambda: source_of(config, name))),
        dtype_of=precision.dtype_of,
        is_trainable=lambda _: False,
        frozen_storage=precision.frozen_storage,
        partition=partition_of(zero_optimization),
    )
    model.sequence = tokens_of(config, mesh).sequence
    log.info("%s: %.2f M parameters, frozen", name, count_parameters(model) / 1e6)
    return FrozenEngine(model, mesh, zero_optimization=zero_optimization, precision=precision)
