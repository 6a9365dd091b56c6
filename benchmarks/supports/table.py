"""Verdicts on all image-text types of the installed transformers, and on the tested text types.

    python -m benchmarks.supports.table      writes results/supports/types.json anew

Each type's default config, with fields of ours for some, is checked as `duotone supports` does, on
the meta device, under the scheme that `enable` takes without a spec; no weights are read. Run it
when a family, a check, a rule of `recommend` or transformers changes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import duotone
from duotone.defaults import CONVERSATIONS
from duotone.hf.model.facts import TESTED_FAMILIES, model_facts
from duotone.hf.verdict import refusal, supports
from duotone.quant import CacheSpec
from duotone.quant.schemes import named
from duotone.report.provenance import stamp

FILE = Path("results/supports/types.json")
GRANITE = ["full_attention" if n % 10 == 5 else "linear_attention" for n in range(40)]
LFM2_MOE = ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)]
COMPASS = (["sliding_attention"] * 3 + ["full_attention"]) * 10
COMPASS_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 50000.0} for kind in dict.fromkeys(COMPASS)
}
HUNYUAN_ROPE = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}
HUNYUAN_ROPE |= {"mrope_section": [16, 16, 16, 16]}
OCR2 = {"hidden_size": 1280, "num_hidden_layers": 12, "num_attention_heads": 10}
OCR2 |= {"num_experts_per_tok": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 11}
DIFFUSION = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
QSA |= {"indexer_budget": 2048, "indexer_compress_ratio": 32}
# Ids of pictures and videos, which default configs leave out; no check looks at the numbers.
IDS = {"image_token_id": 100, "video_token_id": 101}
# Fields where a default config makes no model, or has another shape than published checkpoints;
# written from memory, as docs/supports.md says.
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "cohere_compass": {"text_config": {"layer_types": COMPASS, "rope_parameters": COMPASS_ROPE}},
    "deepseek_ocr2": {"text_config": OCR2},
    "diffusion_gemma": {"text_config": DIFFUSION},
    "emu3": {"vocabulary_map": {"<image>": 151851, "<|extra_200|>": 151846}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "granite4_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16},
        "text_config": {"num_hidden_layers": 40},
        "vision_feature_select_strategy": "full",
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[-19, 9], [-13, 6], [-7, 3], [-1, 0]],
    },
    "granitemoehybrid": {"num_hidden_layers": 40, "layer_types": GRANITE},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": HUNYUAN_ROPE}},
    "lfm2": {"hidden_size": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": LFM2_MOE},
    "lfm2_vl": {"text_config": {"hidden_size": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}},
    "blip-2": {"image_token_index": 100},
    "instructblip": {"image_token_index": 100},
    "instructblipvideo": {"video_token_index": 100},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni"), IDS),
    "qwen4_exp": {"text_config": QSA},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
}


# Of types whose towers need timm, fields of a tower of SigLIP in their place; no check looks at it.
TOWERS: dict[str, dict[str, Any]] = {
    "fast_vlm": {"hidden_size": 3072},
    "gemma3n": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 128,
        "vocab_offset": 262144,
    },
    "perception_lm": {"model_args": {"embed_dim": 1024}},
}


def config_of(model_type: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """A config of these fields, those of a tower of SigLIP included where `TOWERS` has the type."""
    if model_type not in TOWERS:
        return CONFIG_MAPPING[model_type](**fields)
    others = {name: x for name, x in fields.items() if name != "vision_config"}
    config = CONFIG_MAPPING[model_type](**others)
    tower = {"rms_norm_eps": 1e-6, **fields.get("vision_config", TOWERS[model_type])}
    # Gemma 3n's field takes no config of another class.
    vars(config)["vision_config"] = CONFIG_MAPPING["siglip_vision_model"](**tower)
    return config


def full_config(model_type: str) -> PreTrainedConfig:
    """The default config of a type, with the fields that it is published with."""
    return config_of(model_type, AS_PUBLISHED.get(model_type, {}))


def model_types() -> list[str]:
    """All types of the table, by name."""
    return sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *TESTED_FAMILIES})


def row(model_type: str) -> dict[str, Any]:
    """Verdict on a type, or the cause why its config makes no model and nothing refuses it."""
    config = full_config(model_type)
    scheme, spec = _scheme_of(config)
    try:
        verdict = supports(config, spec).to_dict()
    except ValueError as error:
        verdict = _of_config_alone(config, str(error))
    return {**verdict, "model_type": model_type, "scheme": scheme}


def _scheme_of(config: PreTrainedConfig) -> tuple[str, CacheSpec]:
    """(name, spec) that a config is recommended; of a refused one those of conversations."""
    if refusal(duotone.recommend, config) is not None:
        return CONVERSATIONS, named(CONVERSATIONS)
    chosen = duotone.recommend(config)
    return chosen.name, chosen.spec


def _of_config_alone(config: PreTrainedConfig, cause: str) -> dict[str, Any]:
    """A row of the refusal of a config, or of the cause why no model was made."""
    why = refusal(model_facts, config)
    return {"cache": why, "not_made": cause} if why is None else {"cache": why}


def main() -> None:
    """Write all rows with their provenance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    out = parser.parse_args().out
    transformers.utils.logging.set_verbosity_error()
    rows = [row(name) for name in model_types()]
    made = {"schema": "duotone.supports/1", **stamp("cpu"), "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
