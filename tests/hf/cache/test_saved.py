"""Saved caches: what they must belong to, and what is checked before anything of them is used."""

import copy
from pathlib import Path

import pytest
import torch
from saved_caches import SPECS, content, filled, next_logits, rewrite, saved
from test_bases import some_bases, spec_of

import duotone
from duotone import QuantizedCache
from duotone.hf.model.identity import config_differences, config_facts, is_in_memory, weights_digest
from duotone.hf.model.module_facts import number_facts
from duotone.hf.weights import checkpoint as checkpoints
from duotone.hf.weights.checkpoint import model_class
from duotone.quant import bases as bases_module
from duotone.quant.bases import Bases
from duotone.weights.modules.quant_linear import QuantLinear

from families import FAMILIES, new_model, tiny_model
from mquant_setups import quantized

SCHEMES = sorted(set(duotone.schemes()) - {"duotone-klt", "duotone-tuned"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def refused(path: Path, model, match: str, **options) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        QuantizedCache.load(path, model, **options)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", [*SPECS, *SCHEMES])
def test_what_is_saved_loads_after_every_operation(name: str, path: Path) -> None:
    model = tiny_model("internvl")
    cache = filled(model, SPECS[name] if name in SPECS else duotone.scheme(name))
    operations = {
        "rows": lambda c: c.reorder_cache(torch.tensor([2, 0, 1])),
        "one row": lambda c: c.batch_select_indices(torch.tensor([1])),
        "crop": lambda c: c.crop(-2),
        "nothing": lambda c: None,
    }
    for operation in operations.values():
        changed = copy.deepcopy(cache)
        operation(changed)
        changed.save(path)
        again = QuantizedCache.load(path, model)
        assert torch.equal(next_logits(model, again), next_logits(model, changed))
        ours, theirs = again.memory(), changed.memory()
        for part in ("codes", "params", "dense_equivalent", "visual_dense_equivalent"):
            assert getattr(ours, f"{part}_bytes") == getattr(theirs, f"{part}_bytes")


def test_a_file_can_be_written_over_by_the_cache_it_was_read_into(path: Path) -> None:
    model, logits = saved(path)
    cache = QuantizedCache.load(path, model)
    cache.save(path)
    assert torch.equal(next_logits(model, cache), logits)
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), logits)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("where", ["k_proj.weight", "embed_tokens.weight", "norm.weight", "vision"])
def test_other_weights_are_refused_however_few(path: Path, where: str) -> None:
    model, logits = saved(path)
    other = copy.deepcopy(model)
    name, parameter = [item for item in other.named_parameters() if where in item[0]][-1]
    with torch.no_grad():
        parameter.view(-1)[-1] += 1e-3
    refused(path, other, "weights: some parameters")
    loaded = QuantizedCache.load(path, other, waive=("weights",))
    assert loaded.length == QuantizedCache.load(path, model).length
    with torch.no_grad():
        parameter.copy_(model.get_parameter(name))
    assert torch.equal(next_logits(other, QuantizedCache.load(path, other)), logits)


def test_weights_that_change_after_they_were_read_are_read_again() -> None:
    model = new_model("internvl")
    before = weights_digest(model)
    assert weights_digest(model) == before == weights_digest(copy.deepcopy(model))
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 1] += 1
    changed = weights_digest(model)
    weight.data *= 1.5
    assert len({before, changed, weights_digest(model)}) == 3
    with torch.no_grad():
        weight.copy_(kept)
    assert weights_digest(model) == before


def test_weights_that_are_not_in_memory_vouch_for_nothing(path: Path) -> None:
    model, _ = saved(path)
    offloaded = copy.deepcopy(model)
    offloaded.lm_head.weight = torch.nn.Parameter(offloaded.lm_head.weight.to("meta"))
    assert not is_in_memory(offloaded)
    refused(path, offloaded, "nothing is known of this model's")


def test_another_configuration_is_refused_by_the_names_of_its_fields(path: Path) -> None:
    model, _ = saved(path)
    other = copy.deepcopy(model)
    other.config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    other.config.text_config.rms_norm_eps = 0.5
    refused(path, other, r"rms_norm_eps: 1e-06 -> 0\.5, .*rope_theta: 10000\.0 -> 500000\.0")
    refused(path, other, r"waive=\('weights', 'config'\)", waive=("weights",))
    QuantizedCache.load(path, other, waive=("config",))


def test_another_type_is_refused_or_converted(path: Path) -> None:
    model, logits = saved(path)
    half = copy.deepcopy(model).half()
    refused(path, half, r"model's type: float32 -> float16")
    # `half()` rounds the frequencies of positions too.
    refused(path, half, r"configuration: .*inv_freq", waive=("dtype", "weights"))
    loaded = QuantizedCache.load(path, half, waive=("dtype", "weights", "config"))
    assert loaded.layers[0].store.key.dtype == loaded.layers[0].store.dtype == torch.float16
    found = next_logits(half, loaded)
    assert found.dtype == torch.float16
    assert float((found - logits).abs().max() / logits.std()) < 0.05
    rewrite(path, lambda header, tensors: tensors["layers.1.value"].fill_(1e5))
    refused(path, half, "float16", waive=("dtype", "weights", "config"))


def test_bases_that_were_replaced_and_not_copied_are_refused(path: Path, tmp_path: Path) -> None:
    model = tiny_model("internvl")
    file = some_bases(model, tmp_path)
    spec = spec_of(model, file, text=False)
    cache = filled(model, spec)
    cache.save(path)
    logits = next_logits(model, cache)
    Bases.load(file).save(file)
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), logits)
    some_bases(model, tmp_path)
    with pytest.raises(ValueError, match="others than this process has read"):
        QuantizedCache(model, spec)
    forget_bases()
    refused(path, model, "calibrated bases: other content in .*bases.safetensors")
    other = QuantizedCache.load(path, model, waive=("bases",))
    assert not torch.equal(next_logits(model, other), logits)


def forget_bases() -> None:
    """As in a new process."""
    bases_module.bases.cache_clear()
    bases_module.turn.cache_clear()


@pytest.mark.parametrize("former", ["duotone-cache-4", "duotone-cache-5", None])
def test_files_of_another_format_are_refused(path: Path, former: str | None) -> None:
    model, _ = saved(path)
    rewrite(path, lambda header, tensors: header.update(format=former))
    refused(path, model, f"of the format duotone-cache-6, got {former!r}; run the prompt again")


def test_files_with_8_bit_windows_are_refused(path: Path) -> None:
    model = tiny_model("internvl")
    filled(model, SPECS["mixed"]).save(path)
    rewrite(path, lambda header, tensors: header["spec"].update(dense_dtype="float8_e4m3fn"))
    refused(path, model, "cannot be loaded: CacheSpec has no dense_dtype any more; got 'float8")


def test_what_is_waived_is_said_in_words_that_exist(path: Path) -> None:
    model, _ = saved(path)
    for waive in ("weights", ("weight",), (3,)):
        with pytest.raises(ValueError, match="waive must be a tuple of some of"):
            QuantizedCache.load(path, model, waive=waive)


def test_a_missing_file_is_a_missing_file(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        QuantizedCache.load(path, tiny_model("internvl"))


def test_numbers_that_are_none_are_not_saved(path: Path) -> None:
    model = tiny_model("internvl")
    cache = filled(model, SPECS["mixed"])
    cache.layers[1].store.key[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"cannot be saved: .*inf or NaN in layers\.1\.key"):
        cache.save(path)
    assert not path.exists()


def test_only_tokens_that_are_packed_later_need_levels(path: Path) -> None:
    model = tiny_model("internvl")
    cache = filled(model, SPECS["mixed"])
    cache.layers[1].store.key[:, :, : SPECS["mixed"].sink] = 1e30
    cache.save(path)
    assert QuantizedCache.load(path, model).layers[1].store.key.max() == 1e30
    cache.layers[1].store.key[0, :, SPECS["mixed"].sink] = 1e30
    with pytest.raises(ValueError, match=r"cannot be saved: .*must have levels; in layers\.1\.key"):
        cache.save(path)


# (name in a file of "mixed" or "hybrid", what is done to the tensor, words of the refusal).
EDITS = [
    ("ledgers.0.dense.positions", torch.Tensor.zero_, "positions must rise"),
    ("ledgers.0.dense.lengths", lambda t: t.add_(10**6), "must lie in 0 to"),
    ("ledgers.0.dense.lengths", lambda t: t.neg_(), "must lie in 0 to"),
    ("ledgers.0.stream.lengths", lambda t: t.clamp_min_(4).sub_(4), "as wide as it is long"),
    ("ledgers.0.visual.positions", lambda t: t.fill_(2**31 - 1), "positions must be <"),
    ("ledgers.0.visual.positions", lambda t: t.sub_(100), "positions must be >= 0"),
    ("ledgers.0.visual.positions", lambda t: t.add_(1), "in one store"),
    ("ledgers.0.evicted.tokens", lambda t: t.add_(1), "evicts nothing"),
    ("blocks.0", lambda t: t.fill_(2**40), "must begin at 0"),
    ("blocks.0", lambda t: t[:, 1:].fill_(2**40), "must end by"),
    ("blocks.0", lambda t: t.neg_(), "must not overlap"),
    ("blocks.0", lambda t: t[:, 1:].add_(1), "end where their tokens do"),
    ("layers.0.visual.key.scale", lambda t: t.fill_(float("nan")), "must be finite"),
    ("layers.0.stream.value.zero_point", lambda t: t.fill_(float("inf")), "must be finite"),
    ("layers.1.value", lambda t: t[:, :, 0].fill_(float("-inf")), "must be finite"),
    ("layers.1.key", lambda t: t.fill_(1e30), "must have levels; in layers.1.key .*float16"),
    ("layers.1.value", lambda t: t.fill_(-1e30), "must have levels; in layers.1.value .*float16"),
]


@pytest.mark.parametrize(("name", "edit", "match"), EDITS, ids=[f"{e[0]}: {e[2]}" for e in EDITS])
def test_edited_tensors_are_refused_by_rules(name: str, edit, match: str, path: Path) -> None:
    model, _ = saved(path)
    rewrite(path, lambda header, tensors: edit(tensors[name]), signed=False)
    refused(path, model, "is damaged: its checksum")
    refused(path, model, match, waive=("checksum",))


@pytest.mark.parametrize("kind", ["symmetric", "classes", "hybrid", "mixed"])
def test_every_tensor_is_needed_in_its_type_and_shape(kind: str, path: Path) -> None:
    model, _ = saved(path, SPECS[kind])
    whole = path.read_bytes()
    names = [name for name in content(path)[1] if not name.startswith(("layers.1.", "layers.2."))]
    for name in names:
        for change, match in (
            (lambda ts, n=name: ts.pop(n), "missing|no layers|has lengths"),
            (lambda ts, n=name: ts.update({n: ts[n].int().to(torch.int16)}), "must be torch"),
            (lambda ts, n=name: ts.update({n: ts[n][None].clone()}), "of shape|1 sequence"),
        ):
            path.write_bytes(whole)
            rewrite(path, lambda header, tensors, change=change: change(tensors))
            refused(path, model, match)
    path.write_bytes(whole)
    rewrite(path, lambda header, tensors: tensors.update(more=torch.zeros(1)))
    refused(path, model, "no other tensors")


def test_norms_and_classes_are_possible_ones(path: Path) -> None:
    model, _ = saved(path, SPECS["hybrid"])
    rewrite(path, lambda header, tensors: tensors["layers.0.key_norm"].neg_())
    refused(path, model, "must be positive")
    saved(path, SPECS["classes"])
    rewrite(path, lambda header, tensors: tensors["layers.0.visual.key.classes"].zero_())
    refused(path, model, "numbers of channels")


@pytest.mark.parametrize("value", [None, -1, 10**12, "x", [], {}, True, 0.5, float("nan")])
def test_headers_of_other_kinds_are_refused(value: object, path: Path) -> None:
    model, _ = saved(path)
    whole = path.read_bytes()
    fields = [name for name in content(path)[0] if name not in ("weights", "bases", "checksum")]
    for name in fields:
        for waive in ((), ("checksum", "config", "dtype")):
            path.write_bytes(whole)
            rewrite(
                path, lambda header, _, name=name: header.update({name: value}), signed=not waive
            )
            if not (waive and name in ("config", "numbers", "model_dtype")):
                refused(path, model, "cache.safetensors", waive=waive)


def test_shapes_without_data_allocate_nothing(path: Path) -> None:
    model, _ = saved(path)

    def huge(header, tensors) -> None:
        for name in ("streamed", "dense.positions", "dense.lengths", "evicted.tokens"):
            shape = (0,) if name.endswith(("lengths", "tokens")) else (2**40, 0)
            tensors[f"ledgers.0.{name}"] = tensors[f"ledgers.0.{name}"].new_empty(shape)

    rewrite(path, huge)
    refused(path, model, "1 sequence or more")


@pytest.mark.parametrize("name", FAMILIES)
def test_running_or_moving_a_model_does_not_change_its_identity(name: str, tmp_path: Path) -> None:
    model = new_model(name)
    config, numbers = config_facts(model), number_facts(model)
    assert any("rope" in field or "position" in field for field in config)
    assert any(field.endswith("inv_freq") for field in numbers)
    model.save_pretrained(tmp_path)
    again = model_class(model.config).from_pretrained(tmp_path)
    assert config_facts(again) == config
    assert config_differences(numbers, number_facts(again)) == []
    assert weights_digest(again) == weights_digest(model)
    with duotone.enable(model, duotone.scheme("kivi")):
        assert config_facts(model) == config
    assert number_facts(copy.deepcopy(model).train()) == numbers
    assert config_facts(model.half()) == config


def test_a_quantized_model_from_its_checkpoint_takes_its_caches(tmp_path: Path) -> None:
    model = quantized("rtn-w8a8")[0].model
    again = checkpoints.load(checkpoints.save(model, tmp_path / "q"))
    assert config_facts(again) == config_facts(model)
    assert weights_digest(again) == weights_digest(model)
    next(m for m in again.modules() if isinstance(m, QuantLinear)).packed.codes[0, 0] += 1
    assert weights_digest(again) != weights_digest(model)
