"""A frozen base in 8 bits: linear weights as float8 e4m3 with a scale for each output row.

A weight W `[out, in]` is stored as codes `[out, in]` and scales `[out]`: W is about codes * scales. The codes
are e4m3's bytes in a uint8 parameter, which every backend can send and ZeRO-3 shards as any other; float8
itself cannot be sent by gloo. A layer's forward decodes them to the dtype that it computes in.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_ds.models.adapter import is_adapter

STORAGE = torch.float8_e4m3fn
_LARGEST = torch.finfo(STORAGE).max  # 448
_LEAST = torch.finfo(torch.float32).tiny  # a row of zeros has a scale all the same


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 `[out, in]`, and scales, float32 `[out]`: each row's largest entry becomes 448."""
    wide = weight.detach().float()
    scales = (wide.abs().amax(dim=1) / _LARGEST).clamp(min=_LEAST)
    codes = (wide / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(STORAGE)
    return codes.view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``, rounded once: the product is taken in at least float32."""
    return codes.view(STORAGE).to(dtype).mul_(scales[:, None])


class Float8Linear(nn.Linear):
    """A frozen linear layer whose ``weight`` holds codes, and ``row_scale`` their scales.

    The decoded weight is needed for the gradient of the input, so autograd keeps it from the forward on: with
    recomputation for the backward of one block, without it for that of the whole model.
    """

    row_scale: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), decode(self.weight, self.row_scale, dtype), bias)


def quantise(module: nn.Module) -> None:
    """Store the weights of all frozen linear layers in ``module`` as codes; adapters stay as they are.

    The layers are `nn.Linear` by exact class: norms, embeddings and tables are not, nor what computes in
    float32 of its own accord. Needs one weight in float32 beside the module.
    """
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and not layer.weight.requires_grad and not is_adapter(f"{name}.weight"):
            codes, scales = encode(layer.weight)
            layer.__class__ = Float8Linear
            layer.weight = nn.Parameter(codes, requires_grad=False)
            layer.row_scale = nn.Parameter(scales, requires_grad=False)


def needs_recomputation(frozen_storage: torch.dtype | None) -> bool:
    """Whether a base stored so may only train with recomputation of blocks.

    Without it all decoded weights live at once, and 8 bits take more memory than 16 would.
    """
    return frozen_storage == STORAGE
