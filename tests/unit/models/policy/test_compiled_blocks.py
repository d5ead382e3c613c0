"""Blocks compiled for real, by inductor: equal to what they were, at any length, under the same names."""

import copy

import pytest
import torch
from torch import nn

from nemo_rl.models.policy.compiled_blocks import check_compiler, compile_blocks


def test_a_compiled_block_equals_itself_at_any_length_and_is_compiled_once_per_mode() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    compiled = copy.deepcopy(plain)
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    compile_blocks([compiled])
    for length in (5, 7, 12):
        inputs = torch.randn(2, length, 8)
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs), plain(inputs))
        for model in (plain, compiled):
            model.zero_grad()
            model(inputs).square().sum().backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert frames["total"] == frames["ok"] == 2, "one graph with gradient and one without"
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_a_compiler_may_be_named_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "sh -c")
    check_compiler("cuda")
    monkeypatch.setenv("CC", "/no/such/compiler -O1")
    with pytest.raises(ValueError, match=r"on cuda one of /no/such/compiler \(or \$CC\)"):
        check_compiler("cuda")
