"""The benchmark of the refit: what it measures is what training changes, and it says when nothing is proven."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import presets
import pytest
import torch
from measuring import MeasuringWorker
from report import unproven
from transformers import AutoModelForCausalLM

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.models.policy.checkpoint import read_headers
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import make_export_plan
from nemo_rl.models.policy.lora import add_adapters, init_adapters

ROOT = Path(__file__).parents[3]


@pytest.fixture
def lora_worker(tmp_path: Path) -> MeasuringWorker:
    """One rank without a group, after its first refit."""
    folder = presets.write_model("tiny", tmp_path)
    twin, model = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    updates = add_adapters(model, LoRAConfig(enabled=True, exclude_modules=["*.mlp.*"]))
    init_adapters(model, updates, "xavier", seed=1)
    worker = object.__new__(MeasuringWorker)
    worker.model = model
    worker.export_plan = replace(make_export_plan(twin, read_headers(folder), torch.bfloat16), updates=updates)
    worker._state = None
    worker._held = worker._current_state().frozen()
    return worker


def test_only_what_is_trained_is_moved_and_both_paths_send_that_alone(lora_worker: MeasuringWorker) -> None:
    before = {name: parameter.clone() for name, parameter in lora_worker.model.named_parameters()}
    lora_worker.move_weights()
    moved = {name for name, value in lora_worker.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    usual = dict(lora_worker._full_tensors())
    ours = dict(dtensor_params_generator(lora_worker.model, lora_worker.refit_plan()))
    assert len(usual) == 8
    assert all(".self_attn." in name for name in usual)
    assert list(usual) == list(ours)
    assert all(torch.equal(usual[name], tensor) for name, tensor in ours.items())
    assert all(not torch.equal(usual[name], before[_base(name)].bfloat16()) for name in usual)


def _base(name: str) -> str:
    return f"{name.removesuffix('.weight')}.base_layer.weight"


@pytest.mark.parametrize(
    ("equal", "moved", "says"),
    [
        (19, 8, None),
        (8, 19, "after the refit 8 of 19 engine checksums equal the exported folder's, and it changed 19"),
        (19, 0, "after the refit 19 of 19 engine checksums equal the exported folder's, and it changed 0"),
    ],
)
def test_a_proof_holds_when_all_are_equal_and_some_have_moved(equal: int, moved: int, says: str | None) -> None:
    assert unproven({"checksums": 19, "equal": equal, "moved": moved}) == says


def test_a_bad_key_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        f"sys.argv = ['refit.py', '--preset', 'tiny', '--output', {str(tmp_path / 'out')!r}, 'policy.nope=1']\n"
        "try:\n"
        "    runpy.run_path(sys.path[0] + '/refit.py', run_name='__main__')\n"
        "finally:\n"
        "    sys.stdout.write(str('torch' in sys.modules))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False")
    assert ended.stderr.startswith("policy.nope: got 1; unknown key; ")
    assert not (tmp_path / "out").exists()
