"""A model that trains well in high precision and has three layers that NVFP4 breaks, each in its own way."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4engine
from fp4engine.recipe import Recipe

WIDTH, CLASSES, ROWS, STEPS = 64, 8, 32, 6
OUTLIER = "layers.1"
TINY_GRADIENTS = "layers.4"
SATURATING = "head"


class Planted(nn.Module):
    """Six residual layers and a head.

    `layers.1` reads a channel of 10^7 that it ignores, so that the scales of all other blocks underflow. `layers.4`
    gets a gradient of 10^7 on an output that nothing reads, so that all its other gradients underflow. The logits of
    `head` share an offset of thousands, which softmax ignores and whose rounding errors it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        with torch.no_grad():
            self.layers[1].weight[:, 0] = 0
            self.layers[4].weight[0] = 0
            self.head.weight[:, 0] = 3000
        for layer, place in ((self.layers[1], (slice(None), 0)), (self.layers[4], (0,)), (self.head, (slice(None), 0))):
            layer.weight.register_hook(lambda grad, place=place: _zeroed(grad, place))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ignored = x.new_zeros(())
        for index, layer in enumerate(self.layers):
            inner = torch.cat([torch.full_like(x[:, :1], 1e7 if index == 1 else 0.0), x[:, 1:]], 1)
            output = layer(inner)
            if index == 4:
                ignored = 1e7 * (output[:, 0] - output[:, 0].detach()).sum()
            x = x + F.gelu(torch.cat([torch.zeros_like(x[:, :1]), output[:, 1:]], 1))
        return self.head(torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1)), ignored


def _zeroed(grad: Tensor, place: tuple[int | slice, ...]) -> Tensor:
    grad = grad.clone()
    grad[place] = 0
    return grad


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = Planted()
    fp4engine.convert(model)
    return model


def make_run(recipe: Recipe) -> Sequence[float]:
    """Losses of a few steps from the same checkpoint on the same batches."""
    model = make_model()  # made anew: a copy would lose the hooks
    fp4engine.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    losses = []
    for _ in range(STEPS):
        with fp4engine.autocast(recipe=recipe):
            logits, ignored = model(x)
            loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        (loss + ignored).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
