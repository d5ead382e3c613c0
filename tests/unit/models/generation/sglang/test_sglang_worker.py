"""What a worker settles before its server starts."""

import pytest
from sglang_config import make_config

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker


def _worker(tmp_path, *, device="cpu", host="127.0.0.1", **server):
    return SGLangGenerationWorker(
        cfg=make_config(server=server),
        engine_index=0,
        model_folder="/none",
        tokenizer_folder=None,
        device=device,
        log_dir=str(tmp_path),
        host=host,
        keys=AccessKeys.make(),
    )


def test_a_wrong_interface_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(ValueError, match=r"NCCL_SOCKET_IFNAME: got 'nosuch0'; fits no interface .* lo \(127"):
        _worker(tmp_path).start()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_host_is_refused(tmp_path):
    with pytest.raises(ValueError, match="host: got 'no.such.invalid'"):
        _worker(tmp_path, host="no.such.invalid")


def test_nccl_cumem_is_reported_as_the_server_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert [_worker(tmp_path, device=device).nccl_cumem_enable() for device in ("cpu", "cuda")] == ["0", "0"]
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert [_worker(tmp_path, device=device).nccl_cumem_enable() for device in ("cpu", "cuda")] == ["1", "1"]
