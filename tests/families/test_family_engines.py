"""Three families on the real engine: dense and tied, experts, vision-language. `prove.py` has all of them."""

from collections.abc import Iterator

import pytest
from engine_rig import EngineRig
from family import Family
from text_families import TEXT_FAMILIES
from vision_families import VISION_FAMILIES

FAMILIES = {family.name: family for family in (*TEXT_FAMILIES, *VISION_FAMILIES)}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    with EngineRig(tmp_path_factory.mktemp("families")) as rig:
        yield rig


@pytest.mark.parametrize(
    "family", [FAMILIES[name] for name in ("Llama, tied", "Qwen3-MoE", "Qwen2.5-VL")], ids=lambda family: family.name
)
def test_every_digest_equals_that_of_the_checkpoint_loaded_from_disk(rig: EngineRig, family: Family) -> None:
    row = rig.prove(family)
    assert row.num_equal == row.num_digests > 10
    assert row.unmoved == ()
    assert row.num_refits == 7
    assert row.answers == ("text, image" if family.image_prompt else "text")
