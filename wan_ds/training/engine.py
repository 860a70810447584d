"""One expert's DeepSpeed engine. The only module beside the Ulysses attention that imports deepspeed.

Facts about DeepSpeed 0.19.8 that this file works around, each where it is used: gradient_clipping is 1.0
when it is not given; a window of ours is one step of its own (unmanaged accumulation); ZeRO-0 in float32
neither skips a non-finite step nor reports a norm without clipping.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import groups, safe_get_full_grad
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from wan_ds.errors import CheckpointError, ConfigError
from wan_ds.parallel.mesh import COLLECTIVE_TIMEOUT, Mesh
from wan_ds.parallel.reduce import gradient_divisor
from wan_ds.training.optimizer import complete_plain_step
from wan_ds.training.precision import Precision, compute_in_own_dtypes
from wan_ds.training.shards import fragment, whole
from wan_ds.training.unfinished import forget_gradients, release_weights

# DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames.
warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def init_distributed() -> None:
    """Join the world of ranks that the launcher's environment describes; a world of one without a
    launcher."""
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    alone = os.environ["WORLD_SIZE"] == "1" and "MASTER_PORT" not in os.environ
    if alone:
        os.environ["MASTER_PORT"] = "0"  # any free port: nobody else has to find it
    # Only its inference calls use this operator, which would be compiled at the first start on a CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(timeout=COLLECTIVE_TIMEOUT, verbose=False)


def device() -> torch.device:
    """This rank's device."""
    accelerator = deepspeed.get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    return torch.device(accelerator.device_name(), int(os.environ["LOCAL_RANK"]))


def deepspeed_config(
    zero_optimization: dict[str, Any], *, micro_batch_size: int, max_grad_norm: float, precision: Precision
) -> dict[str, Any]:
    """DeepSpeed's configuration of one expert; nothing is left to a default that could change a number."""
    if precision.has_masters and zero_optimization["stage"] == 0:
        raise ValueError("bfloat16 parameters need ZeRO, without which DeepSpeed keeps no float32 masters")
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if zero_optimization["stage"] == 0 else max_grad_norm,
        "zero_optimization": zero_optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision.has_masters},
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "wall_clock_breakdown": False,
    }
    if precision.has_masters:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision.is_autocast:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        torch.set_autocast_cache_enabled(False)  # the cache would hold a bf16 copy of the whole model
    return config


def partition_of(zero_optimization: dict[str, Any]) -> Callable[[nn.Module], None] | None:
    """What shards a complete module's parameters under ZeRO-3, with rank 0's values; None for other stages.

    A collective: every rank calls it with modules of the same parameters in the same order. One zero.Init
    serves all modules of a model, because each would make a group (hpZ) or a swapper (NVMe) of its own.
    """
    if zero_optimization["stage"] != 3:
        return None
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": dict(zero_optimization)}
    node = zero_optimization.get("zero_hpz_partition_size", 1)
    if node > 1 and groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(node)  # which asserts that there is none
    init = deepspeed.zero.Init(
        config_dict_or_path=config,
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group() if node > 1 else None,
    )

    def partition(module: nn.Module) -> None:
        init._convert_to_zero_parameters(module.parameters())  # what Init(module=...) does with it

    return partition


def fused_adamw(params: Iterable[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW on a GPU; raises ConfigError elsewhere, or where it cannot be compiled."""
    if device().type == "cpu":
        raise ConfigError(
            "optimizer=fused_adamw: its kernels are for GPUs, and this machine computes on its CPU; type "
            "optimizer=adamw"
        )
    return _compiled("fused_adamw", FusedAdam, params, adam_w_mode=True, **settings)


def cpu_adamw(params: Iterable[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for states in CPU memory; raises ConfigError where it cannot be compiled."""
    return _compiled("cpu_adamw", DeepSpeedCPUAdam, params, adamw_mode=True, **settings)


def _compiled(name: str, optimizer: type[torch.optim.Optimizer], *args: Any, **settings: Any) -> Any:
    try:
        return optimizer(*args, **settings)
    except (RuntimeError, OSError, ImportError, AssertionError) as error:
        cause = str(error.__cause__ or error).partition("\n")[0]
        raise ConfigError(
            f"optimizer={name}: DeepSpeed could not compile it ({cause}); install a compiler and ninja, or "
            "type optimizer=adamw"
        ) from error


class _Network:
    """A model on this rank's device or sharded over the world, and how it computes."""

    def __init__(self, model: nn.Module, stage: int, precision: Precision) -> None:
        self.stage = stage
        self.precision = precision
        self._names = dict(model.named_parameters())
        if not precision.is_autocast:
            compute_in_own_dtypes(model)
            # What DeepSpeed keeps of an engine with autocast would decide how these gradients are sent.
            torch_autocast.TORCH_AUTOCAST_INITIALIZED = False

    @property
    def module(self) -> nn.Module:
        """The bare module, for calls inside `inference`, on all ranks in the same order."""
        raise NotImplementedError

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The bare module without gradients, computing as it does in training."""
        with torch.no_grad(), self.precision.autocast(device().type):
            yield self.module

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters; under ZeRO-3 a parameter's data is empty between uses."""
        yield from self._names.items()

    @staticmethod
    def shard(parameter: nn.Parameter) -> torch.Tensor:
        """What this rank holds of the parameter."""
        return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data


class FrozenEngine(_Network):
    """A model that does not train: under ZeRO-3 sharded and gathered block by block, else whole on each rank.

    It is in no checkpoint.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, zero_optimization: dict[str, Any], precision: Precision
    ) -> None:
        super().__init__(model, zero_optimization["stage"], precision)
        self._module = model.requires_grad_(False).eval().to(device())
        if self.stage != 3:
            return
        zero = {key: value for key, value in zero_optimization.items() if key != "offload_optimizer"}
        config = deepspeed_config(zero, micro_batch_size=1, max_grad_norm=0.0, precision=precision)
        config |= {"bf16": {"enabled": False}}  # which is about what trains
        config.pop("data_types", None)
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mesh.sequence_parallel_unit)
        self._module = engine.module

    @property
    def module(self) -> nn.Module:
        return self._module


class Engine(_Network):
    """A model sharded over the world with its optimizer.

    A window is any number of `backward` calls and one `step`; the losses passed to `backward` over all
    ranks and micro-batches of the window sum to the window's loss."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        zero_optimization: dict[str, Any],
        micro_batch_size: int,
        max_grad_norm: float,
        precision: Precision,
    ) -> None:
        config = deepspeed_config(
            zero_optimization,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            precision=precision,
        )
        super().__init__(model, zero_optimization["stage"], precision)
        self.before_update: Callable[[], None] | None = (
            None  # called in each step, when reduced gradients exist
        )
        self._divisor = gradient_divisor(
            stage=self.stage,
            reduce_scatter=zero_optimization.get("reduce_scatter", True),
            world_size=mesh.world_size,
            sp_size=mesh.sp_size,
        )
        for name, parameter in self.parameters():
            if parameter.requires_grad and parameter.dtype != precision.trainable_dtype:
                raise ValueError(f"{name} is {parameter.dtype}, and {precision.trainable_dtype} trains")
        if self.stage == 0:
            complete_plain_step(optimizer, max_grad_norm)
        with _without_casts():
            self.engine, *_ = deepspeed.initialize(
                model=model.to(device()), optimizer=optimizer, config=config, mpu=mesh.sequence_parallel_unit
            )
        if self.stage == 0 and mesh.world_size == 1:
            self.engine.enable_backward_allreduce = False  # it would copy all gradients twice, for nobody
        self._watch_update()
        self._calls = 0

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward in a training step."""
        self._calls = len(parameter_offload.FWD_MODULE_STACK)
        return self.engine(*args, **kwargs)

    def backward(self, share: torch.Tensor) -> None:
        """Accumulate the gradients of this rank's share of the window's loss."""
        self.engine.backward(share * self._divisor)

    def step(self, learning_rate: float) -> bool:
        """Reduce, clip and apply the window's gradients; False if any was not finite, and nothing changed."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return self.engine.was_step_applied()

    def abandon(self) -> None:
        """Drop a window that an error ended, so that the next one's numbers are as if it had never been.

        Every rank of the world must have met the error: a rank that went on would wait for the others.
        """
        optimizer = self.engine.optimizer
        self.engine._unmanaged_backward_count = 0
        forget_gradients(self.module, optimizer)
        if self.stage == 3:
            release_weights(self.module, optimizer, parameter_offload.FWD_MODULE_STACK, self._calls)

    @property
    def grad_norm(self) -> torch.Tensor | float:
        """The norm of the last window's gradient before clipping, equal on every rank."""
        return self.engine.optimizer._global_grad_norm

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of the whole parameter; a collective, valid inside the step."""
        if self.stage == 0:
            return parameter.grad
        return safe_get_full_grad(parameter)

    @staticmethod
    def master(parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the float32 numbers that the optimizer steps: flat, in place, without padding.

        One after the other in the order of ranks they are the parameter; None where this rank has no part.
        Under ZeRO-0 each rank has the whole. Not to be kept beyond a load.
        """
        part = fragment(parameter).values
        return part if part.numel() else None

    @staticmethod
    def full_master(parameter: nn.Parameter) -> torch.Tensor:
        """The whole parameter in the float32 that the optimizer steps; a collective."""
        return whole(parameter)

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """In which the parameter's gradient is sent between ranks."""
        if self.stage == 0 or isinstance(self.engine.optimizer, BF16_Optimizer):
            return torch.float32
        return self.engine.optimizer.get_param_comm_dtype(parameter)

    def save(self, folder: Path, tag: str) -> None:
        """Write what trains, its moments and counters, of all ranks below folder/tag; a collective.

        Raises OSError or RuntimeError on a rank that could not write, once all ranks are through: raised
        inside, it would leave the others in DeepSpeed's barriers.
        """
        failures: list[Exception] = []
        files = self.engine.checkpoint_engine
        with ExitStack() as patches:
            for owner, name in ((files, "makedirs"), (files, "save"), (self.engine, "_copy_recovery_script")):
                patches.enter_context(_deferring(owner, name, failures))
            self.engine.save_checkpoint(
                str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=True
            )
        if failures:
            raise failures[0]

    def load(self, folder: Path, tag: str) -> None:
        """Read what `save` wrote, into a fresh engine of the same world; a collective.

        Whether the files hold all that trains is the caller's to know: DeepSpeed reads what it finds.
        """
        with only_tensors():
            path, _ = self.engine.load_checkpoint(
                str(folder), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
            )
        if path is None:
            raise CheckpointError(f"DeepSpeed found no state of {tag} in {folder}")

    def _watch_update(self) -> None:
        """Reach into DeepSpeed's step at the one moment when reduced gradients exist at every stage.

        Under ZeRO-1 and 2 with windows of ours they exist only between the reduction and the ZeRO
        optimizer's step, both inside the engine's."""
        update = self.engine.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self.before_update is not None:
                self.before_update()
            return update(*args, **kwargs)

        self.engine.optimizer.step = step


@contextmanager
def _without_casts() -> Iterator[None]:
    """Inside, an engine for bfloat16 parameters leaves frozen ones as they are.

    Below ZeRO-3 DeepSpeed would cast every parameter that was not partitioned before.
    """
    cast = DeepSpeedEngine._cast_module_mixed_precision
    DeepSpeedEngine._cast_module_mixed_precision = lambda *args: None  # noqa: ARG005
    try:
        yield
    finally:
        DeepSpeedEngine._cast_module_mixed_precision = cast


@contextmanager
def _deferring(owner: Any, name: str, failures: list[Exception]) -> Iterator[None]:
    """Inside, the owner's method notes in ``failures`` what it would raise."""
    write = getattr(owner, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, write)


@contextmanager
def only_tensors() -> Iterator[None]:
    """Inside, DeepSpeed's readers get tensors and containers only: torch.load refuses every other pickled
    object.

    Three plain classes of DeepSpeed's that its ZeRO files name are let through.
    """
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before
