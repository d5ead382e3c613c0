import json
import os
import stat
import threading
from pathlib import Path

import pytest
from sglang.srt.server_args import prepare_server_args

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.key_file import KeyFile


def test_only_this_user_can_open_it_and_nothing_is_on_disk(tmp_path):
    with KeyFile(tmp_path, {"api-key": "x"}) as file:
        status = file.path.stat()
        assert stat.S_ISFIFO(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_once_it_is_read(tmp_path):
    keys = AccessKeys.make()
    with KeyFile(tmp_path, keys.options()) as file:
        file.hand_over()
        assert file.path.exists()
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.append(Path(file.path).read_text()))
        reader.start()
        while reader.is_alive():
            file.hand_over()
        file.hand_over()
        assert list(tmp_path.iterdir()) == []
    assert json.loads(texts[0]) == {"api-key": keys.api_key, "admin-api-key": keys.admin_api_key}


def test_a_reader_that_goes_away_unread_does_no_harm(tmp_path):
    with KeyFile(tmp_path, {"api-key": "x"}) as file:
        os.close(os.open(file.path, os.O_RDONLY | os.O_NONBLOCK))
        file.hand_over()
        assert file.path.exists()


@pytest.mark.parametrize("keys", [AccessKeys("1" * 64, "2" * 63 + "0"), AccessKeys("0" * 62 + "e5", "a" * 64)])
def test_sglang_reads_it_as_its_own_options_even_where_yaml_would_see_a_number(tmp_path, keys):
    with KeyFile(tmp_path, keys.options()) as file:
        results = []
        command = ["--model-path=/none", "--config", str(file.path)]
        reader = threading.Thread(target=lambda: results.append(prepare_server_args(command)))
        reader.start()
        while reader.is_alive():
            file.hand_over()
    assert (results[0].api_key, results[0].admin_api_key) == (keys.api_key, keys.admin_api_key)
