"""Modules that hold parameters under the model's names, and nothing else of the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from autopar.runtime.params import ModelState


class Shell(nn.Module):
    """Holds what the model's submodule of the same path holds."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise NotImplementedError(
            "a submodule of a compiled model holds parameters only; call the compiled model"
        )


def build_shells(root: nn.Module, model: nn.Module) -> dict[str, nn.Module]:
    """Give ``root`` the submodule tree of ``model``; path to holder, the root's is ``""``.

    Training flags are copied; a module that occurs twice is one holder.
    """
    holders: dict[int, nn.Module] = {id(model): root}
    paths: dict[str, nn.Module] = {"": root}
    root.training = model.training
    for path, module in model.named_modules(remove_duplicate=False):
        if not path:
            continue
        if id(module) not in holders:
            holders[id(module)] = Shell()
            holders[id(module)].training = module.training
        parent, _, name = path.rpartition(".")
        # Past add_module: a child may be called as an attribute of ours.
        paths[parent]._modules[name] = paths[path] = holders[id(module)]
    return paths


def fill_shells(paths: Mapping[str, nn.Module], state: ModelState) -> None:
    """Hang parameters and buffers into the holders of `build_shells`."""
    for name, parameter in state.parameters.items():
        holder, _, leaf = name.rpartition(".")
        paths[holder]._parameters[leaf] = parameter
    for name, buffer in state.buffers.items():
        holder, _, leaf = name.rpartition(".")
        paths[holder]._buffers[leaf] = buffer
        if name in state.not_saved:
            paths[holder]._non_persistent_buffers_set.add(leaf)
