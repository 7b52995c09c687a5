"""``loss.backward()`` of a step whose gradients are already there.

A training call runs forward and backward as one program and returns the loss; its ``backward``
multiplies the gradients by what arrives and adds them to ``.grad``. What that order of events
cannot do exactly is refused:

* a second training call while the loss of the first is alive and waits for its backward (drop it,
  with ``del loss``, to go on without that backward);
* ``backward`` twice on one loss, ``create_graph``, ``torch.autograd.grad`` and
  ``backward(inputs=...)`` through it;
* gradient hooks of parameters (hooks after accumulation do run);
* a `torch.amp.GradScaler`: the gradients were computed before it could scale the loss (refused at
  its ``step``, by `optimizer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from autopar.errors import UnsupportedError
from autopar.runtime.host import by_device
from autopar.runtime.params import local_of, wrap_like


@dataclass(eq=False)
class Token:
    """Gradients that wait for a backward; it dies with the loss that would start it.

    Attributes:
        targets: Parameters.
        gradients: This rank's piece of each one's gradient; None once they were added.
    """

    targets: Sequence[nn.Parameter]
    gradients: list[Tensor] | None


class Anchor:
    """A leaf that requires grad and that no user knows.

    Only a plain ``backward()`` reaches it, so it tells that from ``torch.autograd.grad``.

    Attributes:
        tensor: The leaf.
        node: Where autograd accumulates its gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), device=device, requires_grad=True)
        self.node = get_gradient_edge(self.tensor).node


def attach(loss: Tensor, token: Token, anchor: Anchor) -> Tensor:
    """The loss with a backward that adds the token's gradients.

    Args:
        loss: 0-d value.
        token: Kept alive by the result's graph alone.
        anchor: The module's.
    """
    made = _Loss.apply(loss, token, anchor.node, anchor.tensor, *token.targets)  # type: ignore[no-untyped-call]
    return cast(Tensor, made)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Token, anchor_node: Any, *leaves: Any) -> Tensor:
        # The targets are inputs so that autograd.grad with respect to them arrives here, and that
        # autograd runs their hooks after the backward below has added to their ``.grad``.
        ctx.token = token
        ctx.anchor_node = anchor_node
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        token: Token = ctx.token
        if token.gradients is None:
            raise UnsupportedError(
                "cannot run backward twice on one loss: its gradients were added and released; "
                "drop retain_graph, and call parallel(batch) again for another backward"
            )
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "cannot differentiate the backward of a compiled step: create_graph asks for "
                "second derivatives, which the program lacks; use the uncompiled model"
            )
        if not torch._C._will_engine_execute_node(ctx.anchor_node):
            raise UnsupportedError(
                "cannot take selected gradients of a compiled step: torch.autograd.grad and "
                "backward(inputs=...) would leave out what the program has already computed; call "
                "loss.backward() and read .grad"
            )
        gradients, token.gradients = token.gradients, None
        with torch.no_grad():
            deposit(token.targets, gradients, incoming[0])
        return (None,) * (4 + len(token.targets))


def deposit(targets: Sequence[nn.Parameter], gradients: list[Tensor], incoming: Tensor) -> None:
    """Multiply gradients by what arrived at the loss and add them to ``.grad``.

    Args:
        targets: DTensor parameters.
        gradients: This rank's piece of each one's gradient; changed in place.
        incoming: 0-d gradient of the loss.
    """
    if any(p._backward_hooks for p in targets):
        raise UnsupportedError(
            "cannot run a parameter's gradient hook: a compiled step adds whole gradients; use "
            "register_post_accumulate_grad_hook"
        )
    if not gradients:
        return
    if incoming.device.type != "cpu":
        for device, own in by_device(gradients).items():
            torch._foreach_mul_(own, incoming.to(device))
    elif (factor := incoming.item()) != 1.0:
        torch._foreach_mul_(gradients, factor)
    sums: list[Tensor] = []
    terms: list[Tensor] = []
    for parameter, gradient in zip(targets, gradients, strict=True):
        old = parameter.grad
        if old is None:
            parameter.grad = wrap_like(parameter, gradient)
        elif isinstance(old, DTensor) and old.placements == cast(DTensor, parameter).placements:
            sums.append(local_of(old))
            terms.append(gradient)
        else:
            parameter.grad = old + wrap_like(parameter, gradient)
    if sums:
        torch._foreach_add_(sums, terms)
