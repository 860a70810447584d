"""Weights that ranks trained and saved, without the model that they belong to: its import takes seconds."""

from pathlib import Path

import torch
from torch import nn

from wan_ds import streams

Shapes = dict[str, tuple[int, ...]]


class Named(nn.Module):
    """Random parameters under dotted names, every module called once in a forward."""

    def __init__(self, shapes: Shapes, seed: int):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, Named({}, seed))
                owner = owner._modules[part]
            owner.register_parameter(leaf, nn.Parameter(0.1 * streams.normal(tuple(shape), seed, name)))

    def forward(self) -> torch.Tensor:
        own = [parameter.square().mean() for parameter in self.parameters(recurse=False)]
        return torch.stack([*own, *(child() for child in self.children())]).sum()


def save(folder: str, experts: dict[str, Shapes]) -> dict[str, dict[str, torch.Tensor]]:
    """One step of each expert under ZeRO-3 on all ranks, saved to the folder; the weights it ended with."""
    from deepspeed.utils import safe_get_full_fp32_param

    from wan_ds.parallel.mesh import Mesh
    from wan_ds.training.engine import Engine
    from wan_ds.training.precision import Precision

    mesh, weights = Mesh(), {}
    for seed, (expert, shapes) in enumerate(experts.items()):
        network = Named(shapes, seed)
        engine = Engine(
            network,
            torch.optim.AdamW(network.parameters(), lr=1e-2),
            mesh,
            zero_optimization={"stage": 3},
            micro_batch_size=1,
            max_grad_norm=1.0,
            precision=Precision(),
        )
        engine.backward(engine.train() / mesh.world_size)
        assert engine.step(1e-2)
        engine.save(Path(folder), expert)
        weights[expert] = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.parameters()}
    return weights if mesh.is_main else {}
