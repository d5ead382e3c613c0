import pickle

import pytest

from nemo_rl.models.generation.sglang.access import AccessKeys, is_admin_endpoint


def test_keys_are_random_and_in_no_text():
    first, second = AccessKeys.make(), AccessKeys.make()
    values = {first.api_key, first.admin_api_key, second.api_key, second.admin_api_key}
    assert {len(value) for value in values} == {64}
    assert len(values) == 4
    assert repr(first) == str(first) == "AccessKeys()"
    assert pickle.loads(pickle.dumps(first)) == first


def test_each_kind_of_call_carries_its_own_key():
    keys = AccessKeys("a" * 64, "b" * 64)
    assert keys.headers(admin=False) == {"Authorization": "Bearer " + "a" * 64}
    assert keys.headers(admin=True) == {"Authorization": "Bearer " + "b" * 64}
    assert keys.options() == {"api-key": "a" * 64, "admin-api-key": "b" * 64}


@pytest.mark.parametrize("bad", ["", "a" * 63, "A" * 64, "my secret key"])
def test_a_key_that_a_log_could_not_be_cleaned_of_is_refused_without_showing_it(bad):
    for arguments in ((bad, "b" * 64), ("b" * 64, bad)):
        with pytest.raises(ValueError, match="expected 64 hexadecimal digits") as caught:
            AccessKeys(*arguments)
        assert "b" * 64 not in str(caught.value)
        assert not bad or bad not in str(caught.value)


def test_only_what_changes_an_engine_is_administrative():
    assert is_admin_endpoint("/update_weights_from_distributed")
    assert is_admin_endpoint("/flush_cache")
    for endpoint in ("/generate", "/model_info", "/server_info", "/openapi.json", "/health"):
        assert not is_admin_endpoint(endpoint)
