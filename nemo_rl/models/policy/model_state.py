"""What a model holds by names without wrappers, kept for as long as its tree of modules stays as it is."""

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.policy.export_plan import ExportPlan, is_plain

WRAPPER_PREFIXES = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|module|base_layer)\.")
"""What torch.compile, activation checkpointing, data parallelism and peft put into names."""

_ABSENT = object()
"""None is a value: what a layer without bias holds as `bias`."""


def clean_name(name: str) -> str:
    """The name as it is without wrappers."""
    return WRAPPER_PREFIXES.sub("", name)


def clean_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by names without wrappers. What a forward pass left gathered is resharded."""
    # Not detached: for hundreds of DTensors that would take longer than to send them.
    return {clean_name(name): value for name, value in model.state_dict(keep_vars=True).items()}


class ModelState:
    """Walking a model for its names takes longer than gathering a bucket, so it is done once: see `is_of`.

    What is kept are the tensors themselves, so an optimizer's step shows in them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tensors = clean_state(model)
        self._checked: ExportPlan | None = None
        modules = list(model.modules())
        self._modules = [(one, one._modules, one._parameters, one._buffers) for one in modules]
        self._members = [members for one in modules for members in (one._modules, one._parameters, one._buffers)]
        self._entries = [(members, *item) for members in self._members for item in members.items()]
        same: dict[torch.Size, torch.Size] = {}
        tensors = [value for *_, value in self._entries if isinstance(value, torch.Tensor)]
        self._shapes = [(tensor, same.setdefault(tensor.shape, tensor.shape)) for tensor in tensors]
        self._unsaved = [(one, frozenset(one._non_persistent_buffers_set)) for one in modules if one._buffers]
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {clean_name(name): parameter for name, parameter in named}

    def is_of(self, model: PreTrainedModel) -> bool:
        """Whether `model` is the one, and all that it holds is the same objects at the same places in the same shapes."""
        if model is not self._model:
            return False
        # Plain loops: what takes the time is memory that is touched once.
        for one, modules, parameters, buffers in self._modules:
            if one._modules is not modules or one._parameters is not parameters or one._buffers is not buffers:
                return False
        for members, name, value in self._entries:
            if members.get(name, _ABSENT) is not value:
                return False
        for tensor, shape in self._shapes:
            if tensor.shape != shape:
                return False
        if sum(map(len, self._members)) != len(self._entries):
            return False
        return all(one._non_persistent_buffers_set == names for one, names in self._unsaved)

    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters that do not require a gradient now."""
        return {name: parameter for name, parameter in self._parameters.items() if not parameter.requires_grad}

    def tensors(self, plan: ExportPlan) -> Mapping[str, torch.Tensor]:
        """`clean_state`, of which the plan is known to be.

        Raises:
            ManifestError: it is not.
        """
        if self._checked is not plan:
            _check_sources(type(self._model).__name__, self._tensors, self._parameters, plan)
            self._checked = plan
        return self._tensors


def _check_sources(
    model: str, state: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter], plan: ExportPlan
) -> None:
    tied = plan.twin.all_tied_weights_keys
    if parted := [f"{a} from {b}" for a, b in tied.items() if parameters.get(a) is not parameters.get(b)]:
        raise ManifestError(f"{model} has weights that were tied at set-up and are not: {listed(parted)}")
    reshaped = [
        f"{group.sources[0]} {list(state[group.sources[0]].shape)}, {specs[0].describe()}"
        for group, specs in plan.parts
        if is_plain(group, specs) and group.sources[0] in state and state[group.sources[0]].shape != specs[0].shape
    ]
    if reshaped:
        raise ManifestError(f"{model} has other shapes than at set-up: {listed(reshaped)}")
    factors = {name for update in plan.updates.values() for name in (update.a, update.b)}
    planned = {source for spec in plan.manifest.specs for source in spec.sources} | plan.left_out | factors
    held = state.keys() - tied.keys()
    if planned != held:
        raise ManifestError(
            f"{model} has changed since set-up: gone are {listed(sorted(planned - held)) or 'none'}; "
            f"new are {listed(sorted(held - planned)) or 'none'}"
        )
