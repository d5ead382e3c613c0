import gc
import pickle
import threading

import pytest
from fake_server import FakeEngineServer

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.engine_calls import gather_answers
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.receiver import HttpReceiver
from nemo_rl.utils.threads import on_thread

KEYS = AccessKeys.make()
GROUP = GroupSpec("refit", "gloo", "10.0.0.1", 29500, 3)
SESSION = ("/begin_weight_update", "/end_weight_update")
DONE = (200, {"success": True})


def header(*, flattened):
    return BucketHeader(2, ("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)), flattened)


def description(*paths):
    fields = {"requestBody": {"content": {"application/json": {"schema": {"properties": {}}}}}}
    updates = ("/update_weights_from_distributed", "/pause_generation")
    return 200, {"paths": {path: {"post": fields} for path in (*updates, *paths)}}


def test_the_receiver_asks_the_server_itself():
    endpoints = ["/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"]
    with FakeEngineServer(dict.fromkeys(endpoints, DONE)) as fake:
        engine = HttpReceiver(EngineControl("engine 4", fake.url, 5.0, KEYS), takes_flattened=True)
        assert engine.name == f"engine 4 at {fake.url}"
        engine.join(GROUP, 1, 5.0).result(5.0)
        engine.announce(header(flattened=True), "refit", 5.0).result(5.0)
        engine.announce(header(flattened=False), "refit", 5.0).result(5.0)
        engine.leave("refit", 5.0).result(5.0)
    place = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    bucket = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], [4]], "group_name": "refit"}
    bucket["flush_cache"] = False
    assert fake.requests == [
        (endpoints[0], {**place, "group_name": "refit", "backend": "gloo"}),
        (endpoints[1], {**bucket, "load_format": "flattened_bucket"}),
        (endpoints[1], bucket),
        (endpoints[2], {"group_name": "refit"}),
    ]
    assert set(fake.authorizations) == {f"Bearer {KEYS.admin_api_key}"}


@pytest.mark.parametrize("paths", [SESSION, ()], ids=["session", "none"])
def test_a_session_is_opened_and_closed_where_the_server_has_one(paths):
    answers = {"/openapi.json": description(*paths), **dict.fromkeys(SESSION, DONE)}
    with FakeEngineServer(answers) as fake:
        control = EngineControl("engine 4", fake.url, 5.0, KEYS)
        control.begin_weight_update()
        control.end_weight_update()
    assert [endpoint for endpoint, _ in fake.requests if endpoint != "/openapi.json"] == list(paths)


def test_a_process_has_one_per_server_as_long_as_it_holds_it():
    sent = pickle.dumps([HttpReceiver(EngineControl("engine 4", "http://127.0.0.1:1", 5.0, KEYS), True)] * 2)
    first, again = pickle.loads(sent)
    assert first.control is again.control is pickle.loads(sent)[0].control
    assert (first.name, first.takes_flattened) == ("engine 4 at http://127.0.0.1:1", True)
    client = first.control._http
    del first, again
    gc.collect()
    assert pickle.loads(sent)[0].control._http is not client


def test_every_call_is_an_answer_or_a_fault():
    def refuse():
        raise EngineError("engine 1", "/x", 400, "no")

    release = threading.Event()
    calls = {"good": on_thread("x", lambda: 7), "bad": on_thread("x", refuse), "late": on_thread("x", release.wait)}
    assert gather_answers(calls, 0.2) == (
        {"good": 7},
        {"bad": "engine 1 /x: HTTP 400: no", "late": "no answer within 0.2 s"},
    )
    release.set()
    assert gather_answers({"late": calls["late"]}, 5.0) == ({"late": True}, {})
    assert gather_answers({}, 0.0) == ({}, {})
