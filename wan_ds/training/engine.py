"""One expert's DeepSpeed engine. The only module beside the Ulysses attention that imports deepspeed.

Facts about DeepSpeed 0.19.8 that this file works around, each where it is used: gradient_clipping is 1.0
when it is not given; a window of ours is one step of its own (unmanaged accumulation); ZeRO-0 in float32
neither skips a non-finite step nor reports a norm without clipping.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import groups, safe_get_full_grad
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from wan_ds.errors import CheckpointError
from wan_ds.parallel.mesh import COLLECTIVE_TIMEOUT, Mesh
from wan_ds.parallel.reduce import gradient_divisor

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
    zero_optimization: dict[str, Any], *, micro_batch_size: int, max_grad_norm: float, compute_dtype: str
) -> dict[str, Any]:
    """DeepSpeed's configuration of one expert; nothing is left to a default that could change a number."""
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if zero_optimization["stage"] == 0 else max_grad_norm,
        "zero_optimization": zero_optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "wall_clock_breakdown": False,
    }
    if compute_dtype == "bf16":
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


class Engine:
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
        compute_dtype: str,
    ) -> None:
        self.stage: int = zero_optimization["stage"]
        self._compute_dtype = compute_dtype
        self.before_update: Callable[[], None] | None = (
            None  # called in each step, when reduced gradients exist
        )
        self._names = dict(model.named_parameters())
        self._divisor = gradient_divisor(
            stage=self.stage,
            reduce_scatter=zero_optimization.get("reduce_scatter", True),
            world_size=mesh.world_size,
            sp_size=mesh.sp_size,
        )
        if self.stage == 0:
            _complete_plain_step(optimizer, max_grad_norm)
        config = deepspeed_config(
            zero_optimization,
            micro_batch_size=micro_batch_size,
            max_grad_norm=max_grad_norm,
            compute_dtype=compute_dtype,
        )
        self.engine, *_ = deepspeed.initialize(
            model=model.to(device()), optimizer=optimizer, config=config, mpu=mesh.sequence_parallel_unit
        )
        self._watch_update()

    @property
    def module(self) -> nn.Module:
        """The bare module, for calls inside `inference`, on all ranks in the same order."""
        return self.engine.module

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The bare module without gradients, in the dtype that training computes in."""
        autocast = torch.autocast(device().type, torch.bfloat16, enabled=self._compute_dtype == "bf16")
        with torch.no_grad(), autocast:
            yield self.module

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward in a training step."""
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

    @property
    def grad_norm(self) -> torch.Tensor | float:
        """The norm of the last window's gradient before clipping, equal on every rank."""
        return self.engine.optimizer._global_grad_norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters; under ZeRO-3 a parameter's data is empty between uses."""
        yield from self._names.items()

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of the whole parameter; a collective, valid inside the step."""
        if self.stage == 0:
            return parameter.grad
        return safe_get_full_grad(parameter)

    @staticmethod
    def shard(parameter: nn.Parameter) -> torch.Tensor:
        """What this rank holds of the parameter."""
        return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data

    def save(self, folder: Path, tag: str) -> None:
        """Write weights, moments and counters of all ranks below folder/tag; a collective.

        Raises OSError or RuntimeError on a rank that could not write, once all ranks are through: raised
        inside, it would leave the others in DeepSpeed's barriers.
        """
        failures: list[Exception] = []
        files = self.engine.checkpoint_engine
        with ExitStack() as patches:
            for owner, name in ((files, "makedirs"), (files, "save"), (self.engine, "_copy_recovery_script")):
                patches.enter_context(_deferring(owner, name, failures))
            self.engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        if failures:
            raise failures[0]

    def load(self, folder: Path, tag: str) -> None:
        """Read what `save` wrote, into a fresh engine of the same world; a collective."""
        with only_tensors():
            path, _ = self.engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
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


def _complete_plain_step(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    """Give a ZeRO-0 optimizer what ZeRO's own step does: the norm, clipping, and skipping what is not finite.

    DeepSpeed reads ``overflow`` and ``_global_grad_norm`` from whatever optimizer it holds.
    """
    update = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        optimizer._global_grad_norm = norm
        optimizer.overflow = not torch.isfinite(norm).item()  # the one sync of a ZeRO-0 step
        if optimizer.overflow:
            return None
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        return update(*args, **kwargs)

    optimizer.step = step


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
