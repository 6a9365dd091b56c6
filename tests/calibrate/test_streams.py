"""Residual streams: what a layer's MLP adds is known, by hand and by the modules of families."""

import pytest
import torch
from torch import nn

from duotone.calibrate import Settings, calibrate, calibration_data
from duotone.calibrate.budget import widths_of
from duotone.calibrate.moments import CalibrationBatch, gather_moments
from duotone.calibrate.streams import hearing
from duotone.hf.model.facts import model_facts
from duotone.loading import Loaded
from tiny_text import text_batch, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, pictured, tiny_model

from families import FAMILIES, HYBRIDS, inputs
from families import tiny_model as family_model

# Parallel to attention, without an MLP, with several streams.
NOT_HEARD = {"cohere2", "aya_vision", "nemotron_h", "gemma3n_text"}
HEARD = ["llava", "gemma3", "qwen2_vl", "glm4v", "chameleon", "emu3", "llama", "molmo2"]
HEARD += ["qwen3_vl_moe", "phi4_multimodal", "qwen3_next", "olmo_hybrid", "lfm2_moe", "jamba"]
HEARD += ["granitemoehybrid", "llama4", "gemma4", "gemma4_e2b", "paligemma2"]


class Times(nn.Module):
    """A norm, an attention or an MLP that multiplies."""

    def __init__(self, factor: float, layer_idx: int | None = None) -> None:
        super().__init__()
        self.factor = factor
        if layer_idx is not None:
            self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None] | torch.Tensor:
        out = x * self.factor
        return (out, None) if hasattr(self, "layer_idx") else out


class Layer(nn.Module):
    """Attention adds twice its input, the MLP thrice its own."""

    def __init__(self, order: str, number: int) -> None:
        super().__init__()
        self.order = order
        self.norm, self.attention = Times(1.0), Times(2.0, number)
        self.later_norm, self.mlp, self.last_norm = Times(1.0), Times(3.0), Times(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        added, _ = self.attention(normed)
        if self.order == "parallel":
            return x + added + self.mlp(normed)
        if self.order == "no MLP":
            return x + added
        if self.order == "norms after":
            x = x + self.later_norm(added)
            return x + self.last_norm(self.mlp(x))
        x = x + added
        return x + self.mlp(self.later_norm(x))


class Decoder(nn.Module):
    def __init__(self, *orders: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(order, i) for i, order in enumerate(orders))

    def get_decoder(self) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_stream_after_attention_is_what_the_layer_made_itself() -> None:
    model = Decoder("norms before", "norms after", "parallel", "no MLP", "norms before")
    x, found = torch.randn(2, 3, 4), {}
    with hearing(model, [0, 1, 2, 3], lambda i, stream, y: found.update({i: (stream, y)})):
        model(x)
    assert sorted(found) == [0, 1]
    for layer, before in ((0, x), (1, 12 * x)):
        stream, output = found[layer]
        torch.testing.assert_close(stream, 3 * before)
        torch.testing.assert_close(output, 12 * before)
    found.clear()
    model(x)
    assert not found


@torch.no_grad()
def test_weights_are_those_of_the_modules() -> None:
    """Llama's norm before its MLP reads the stream, and the MLP's output is added as it is."""
    model, batch = text_model(), text_batch([9])
    kept, logs = {}, []
    for layer in model.model.layers:
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda m, given, at=layer: kept.update({(at, "x"): given[0][0].double()})
        )
        layer.mlp.register_forward_hook(
            lambda m, given, out, at=layer: kept.update({(at, "m"): out[0].double()})
        )
    model(**batch)
    for layer in model.model.layers:
        ratios = kept[layer, "m"].square().sum(-1) / kept[layer, "x"].square().sum(-1)
        logs.append(ratios.log1p().mean())
    found = gather_moments(model, [CalibrationBatch(batch, 1)], group=4)
    weights = torch.tensor([layer.weight for layer in found], dtype=torch.double)
    torch.testing.assert_close(weights, torch.stack(logs).exp(), rtol=1e-5, atol=0)
    assert [layer.heard for layer in found] == [9] * len(found)
    assert weights.min() > 1.05


@torch.no_grad()
def test_a_layer_whose_mlp_adds_nothing_has_a_weight_of_one() -> None:
    model = text_model()
    model.model.layers[1].mlp.down_proj.weight.zero_()
    found = gather_moments(model, [CalibrationBatch(text_batch([9]), 3)], group=4)
    assert found[1].weight == 1.0
    assert found[0].weight > 1.05


def test_padding_and_what_follows_an_answer_count_nothing() -> None:
    model = tiny_model()
    together = gather_moments(model, [CalibrationBatch(pictured([0, 1, 2, 3]), 4)])
    alone = gather_moments(model, [CalibrationBatch(pictured([i]), 4) for i in range(4)])
    for one, other in zip(together, alone, strict=True):
        assert one.heard == other.heard == one.queries
        assert one.weight == pytest.approx(other.weight, rel=1e-3)


@pytest.mark.parametrize("name", [*HEARD, *sorted(NOT_HEARD)])
def test_families(name: str) -> None:
    """All packed layers or none; after attention alone a stream is shorter than with the MLP."""
    model, family = family_model(name), {**FAMILIES, **HYBRIDS}[name]
    parts, found = ["image"] if family.is_multimodal else [6], {}
    packed = model_facts(model).packed
    with torch.no_grad(), hearing(model, packed, lambda i, x, y: found.update({i: (x, y)})):
        model(**inputs(name, [[3, *parts, 4]]))
    assert sorted(found) == ([] if name in NOT_HEARD else list(packed))
    assert all(0 < float((y - x).norm()) < 2 * float(x.norm()) for x, y in found.values())


def test_layers_of_more_weight_get_more_bits() -> None:
    spectrum = torch.linspace(1, 0.1, 64, dtype=torch.double)
    spectra = {(i, which, "visual"): spectrum for i in range(2) for which in ("key", "value")}

    def bits(classes, layer):
        return sum(b * s for name, c in classes.items() if name[0] == layer for b, s in c)

    even = widths_of(spectra, 1.0, {"visual": 1.0})
    first = widths_of(spectra, 1.0, {"visual": 1.0}, [8.0, 1.0])
    assert bits(even, 0) == pytest.approx(bits(even, 1), abs=0.25)
    assert bits(first, 0) > bits(first, 1) + 0.5


def test_a_calibration_spends_bits_by_its_weights_and_names_them() -> None:
    """An MLP that adds a hundredfold to the first layer's stream moves bits into that layer."""
    spent = {}
    for factor in (1.0, 100.0):
        model = tiny_model()
        model.get_decoder().layers[0].mlp.down_proj.weight.data *= factor
        loaded = Loaded("tiny", model, TinyProcessor())
        data = calibration_data(loaded, [TINY_TASK], 4, 4)
        bases, _, report = calibrate(loaded, data.batches, Settings())
        rows = [row for row in report["tensors"] if row["layer"] == 0]
        spent[factor] = sum(row["bits"] * row["share"] for row in rows)
        weights = bases.header["layer_weights"]
        assert len(weights) == 3
        assert report["header"]["layer_weights"] == weights
    assert weights[0] > 100
    assert spent[100.0] > spent[1.0] + 0.5
