"""The entry point: another vLLM is refused by a sentence."""

import pytest

from duotone.serve import plugin
from duotone.serve.pages import served_spec


@pytest.mark.parametrize("found", ["0.32.1", "0.34.0", "1.0.0", "0.330.0"])
def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: found)
    with pytest.raises(RuntimeError, match=rf"vLLM 0.33; got {found}. Install vllm==0.33"):
        plugin.register()


def test_every_dtype_has_a_spec() -> None:
    assert set(plugin.DTYPES.values()) == {2, 4}
    assert all(served_spec(bits).key.bits == bits for bits in plugin.DTYPES.values())
