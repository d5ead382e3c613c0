"""When what was found in a model is taken again, and when the model is walked anew."""

from collections.abc import Callable
from typing import Any

import policy_cases as cases
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nemo_rl.config.schema import OptimizerConfig
from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.model_state import ModelState, clean_state
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model
from nemo_rl.models.policy.train_step import make_optimizer, train_on_batch

Known = tuple[PreTrainedModel, ExportPlan, ModelState]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
"""A persistent buffer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cases.write_model(tmp_path_factory.mktemp("state") / "model", cases.glm_moe_config())


@pytest.fixture
def known(folder: str, mesh: DeviceMesh) -> Known:
    model, plan = load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.float32))
    state = ModelState(model)
    state.tensors(plan)
    return model, plan, state


def train(model: PreTrainedModel) -> None:
    optimizer = make_optimizer(model.parameters(), OptimizerConfig.model_validate({"kwargs": cases.ADAMW}))
    batch = cases.make_batch(0, vocab=64)
    train_on_batch(
        model, optimizer, None, batch, cases.WeightedLoss(), micro_batch_size=4, temperature=1.0, max_grad_norm=1.0
    )


def test_a_training_step_leaves_it_current_and_shows_in_its_tensors(known: Known) -> None:
    model, plan, state = known
    before = {name: tensor.clone() for name, tensor in dtensor_params_generator(model, plan, state=state)}
    train(model)
    assert state.is_of(model)
    fresh = clean_state(model)
    assert state.tensors(plan).keys() == fresh.keys()
    assert all(tensor is fresh[name] for name, tensor in state.tensors(plan).items())
    after = {name: tensor.clone() for name, tensor in dtensor_params_generator(model, plan, state=state)}
    anew = dict(dtensor_params_generator(model, plan))
    assert list(after) == list(before) == list(anew)
    assert all(torch.equal(after[name], tensor) for name, tensor in anew.items())
    assert sum(not torch.equal(after[name], tensor) for name, tensor in before.items()) > len(before) / 2


def replace_parameter(model: Any) -> None:
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach().clone())


def rename_parameter(model: Any) -> None:
    """As many as before; what goes is None."""
    up = model.model.layers[0].mlp.up_proj
    del up.bias
    up.scale = torch.nn.Parameter(torch.ones(1))


def rename_module(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.up = mlp.up_proj
    del mlp.up_proj


def replace_dictionary(model: Any) -> None:
    """As a module does that is given another's state."""
    norm = model.model.norm
    norm.__setstate__(norm.__dict__ | {"_parameters": {"weight": torch.nn.Parameter(torch.ones(32))}})


def replace_module(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)


def remove_module(model: Any) -> None:
    del model.model.layers[1]


def wrap_module(model: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0])


def replace_buffer(model: Any) -> None:
    model.get_submodule(BIAS.rpartition(".")[0]).e_score_correction_bias = torch.ones(8)


def save_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq, persistent=True)


def reshape_parameter(model: Any) -> None:
    model.model.norm.weight.data = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_parameter, None),
        (rename_parameter, "gone are none; new are model.layers.0.mlp.up_proj.scale"),
        (rename_module, "gone are model.layers.0.mlp.up_proj.weight; new are model.layers.0.mlp.up.weight"),
        (replace_dictionary, None),
        (replace_module, None),
        (remove_module, "gone are model.layers.1.input_layernorm.weight"),
        (wrap_module, None),
        (replace_buffer, None),
        (save_buffer, "gone are none; new are model.rotary_emb.inv_freq"),
        (reshape_parameter, r"other shapes than at set-up: model.norm.weight \[3\]"),
        (lambda model: model.model.norm.register_parameter("bias", None), None),
        (lambda model: model.model.norm.register_buffer("late", torch.ones(1)), "new are model.norm.late"),
        (lambda model: model.load_state_dict(model.state_dict(), assign=True), None),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_a_change_is_noticed_and_what_the_plan_does_not_hold_is_refused(
    change: Callable[[PreTrainedModel], object], says: str | None, known: Known
) -> None:
    model, plan, state = known
    assert state.is_of(model)
    change(model)
    assert not state.is_of(model)
    anew = ModelState(model)
    if says is None:
        fresh = clean_state(model)
        assert all(tensor is fresh[name] for name, tensor in anew.tensors(plan).items())
        assert anew.is_of(model)
        return
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(ManifestError, match=says):
            next(dtensor_params_generator(model, plan, state=anew))


def test_another_model_of_the_same_form_is_another(known: Known, folder: str, mesh: DeviceMesh) -> None:
    _, _, state = known
    assert not state.is_of(load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.float32))[0])


def test_what_is_frozen_is_asked_each_time(known: Known) -> None:
    model, plan, state = known
    assert state.frozen() == {}
    model.model.norm.requires_grad_(False)
    assert state.is_of(model)
    assert state.frozen() == {"model.norm.weight": model.model.norm.weight}
    part = plan.without(state.frozen())
    assert {spec.name for spec in part.manifest.specs} == {spec.name for spec in plan.manifest.specs} - {
        "model.norm.weight"
    }
    assert part is plan.without({"model.norm.weight"})
    assert part is not plan.without({"model.norm.weight", "lm_head.weight"})
    assert plan.without(()) is plan


def test_every_plan_is_checked(known: Known) -> None:
    _, plan, state = known
    first = plan.manifest.specs[0].name
    part = plan.without({first})
    assert state.tensors(part) is state.tensors(plan)
    short = ExportPlan(part.manifest, part.groups, part.twin)
    for _ in range(2):
        with pytest.raises(ManifestError, match=f"gone are none; new are {first}$"):
            state.tensors(short)
        state.tensors(plan)


def test_gathered_weights_are_resharded_before_they_are_remembered(known: Known) -> None:
    model, plan, state = known
    for _ in range(2):  # FSDP2 takes its gathered parameters again: the second time they are known ones
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not state.is_of(model)
        state = ModelState(model)
        values = state.tensors(plan)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(values[name] is parameter for name, parameter in model.named_parameters())
        assert state.is_of(model)


def test_what_is_frozen_is_told_by_shards(known: Known) -> None:
    model, _, _ = known
    model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    model.model.norm.requires_grad_(False)  # of the gathered copy: the shard is trained on
    assert ModelState(model).frozen() == {}
    assert model.model.norm.weight.requires_grad
