"""Specs that cannot be right: one clear error before the model runs, in Python and on the CLI."""

import json

import pytest
from cli_runs import error_of

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, Sharing, TensorSpec
from duotone.evaluate import evaluate, evaluate_perplexity
from duotone.inference.compare import bundled_prompts, compare
from duotone.loading import Loaded
from duotone.tasks.text.passages import Passages
from tiny_text import text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

# Three layers, heads of 16 channels.
STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, "channels", 8))
TEXT = CacheSpec(visual="text", text=STREAM, recent=4)
PARTED = CacheSpec(visual=STREAM, background=STREAM)
ODD_GROUP = KVSpec(STREAM.key, TensorSpec(2, "channels", 12))


def data(spec: CacheSpec, **fields: object) -> dict:
    return {**spec.to_dict(), **fields}


def tensor(**fields: object) -> dict:
    return data(
        TEXT, text={"key": {"bits": 2, "group": 4, **fields}, "value": {"bits": 2, "group": 4}}
    )


# name: (what a spec file would hold, what the error says)
FILES = {
    "odd-kq-with-sharing": (
        data(duotone.scheme("xquant", kq=1, vq=2)),
        r"equal bits, along, group and mapping; got 'key of layer 1: 1 bits, 0: 2'.*even kq",
    ),
    "group-does-not-divide-head-dim": (
        data(TEXT.replace(text=ODD_GROUP)),
        r"group along channels must divide head_dim, which is 16 .* got group=12",
    ),
    "group-does-not-divide-in-a-rule": (
        data(TEXT, layers=[{"start": 2, "text": ODD_GROUP.to_dict()}]),
        r"group along channels must divide head_dim, which is 16 .* got group=12",
    ),
    "classes-are-no-whole-channels": (
        data(TEXT.replace(visual=KVSpec(TensorSpec(classes=((4, 1 / 10),)), STREAM.value))),
        "shares of classes must give whole channels",
    ),
    "tau-without-visual-spans": (
        data(TEXT, tau=[0, 3]),
        "tau needs quantized visual spans; got 'text'",
    ),
    "background-without-visual-spans": (
        data(TEXT, background=STREAM.to_dict()),
        "a background needs quantized visual spans; got 'text'",
    ),
    "background-with-shared-codes": (
        data(PARTED, share={"key": 0, "value": 0}),
        "a background and shared codes exclude each other",
    ),
    "everything-in-front": (
        data(PARTED, foreground=1.0),
        r"foreground must lie in \(0, 1\); got 1.0",
    ),
    "short-spans-in-front": (
        data(PARTED, short_foreground=[128, 1.01]),
        r"short_foreground must be \(tokens, share\), a share in \(0, 1\], or None; got",
    ),
    "short-spans-in-falling-steps": (
        data(PARTED, short_foreground=[[128, 1.0], [60, 0.1]]),
        r"tokens of short_foreground must rise; got \[\[128, 1.0\], \[60, 0.1\]\]",
    ),
    "no-multiple-in-front": (
        data(PARTED, foreground_multiple=0),
        "foreground_multiple must be an integer >= 1; got 0",
    ),
    "a-rule-for-no-background": (
        data(PARTED.replace(background=None), layers=[{"background": STREAM.to_dict()}]),
        "a rule for background needs a quantized background; got None",
    ),
    "eta-below-zero": (tensor(eta=-0.1), r"eta must lie in \[0, 0.5\); got -0.1"),
    "rules-for-a-deeper-model": (
        data(duotone.scheme("xquant", kq=30, vq=2, km=32, vm=16)),
        r"rules must lie within 3 layers; got \(30, None\)",
    ),
    "sharing-for-a-deeper-model": (
        data(TEXT.replace(share=Sharing(key=32, value=2))),
        r"sharing must start within 3 layers; got \('key', 32\)",
    ),
    "unknown-field": (data(TEXT, residual=128), "CacheSpec has the fields .*; got .*residual"),
    "8-bit-windows": (
        data(TEXT, dense_dtype="float8_e4m3fn"),
        "CacheSpec has no dense_dtype any more; got 'float8_e4m3fn'. Windows in 8-bit floats .*"
        "leave the field out",
    ),
    "unknown-field-inside": (tensor(nbits=2), "TensorSpec has the fields .*; got .*nbits"),
    "bits-no-integer": (tensor(bits=2.0), "bits must be one of"),
}


@pytest.fixture
def still(monkeypatch):
    """A model that must not run."""
    model = tiny_model()
    for module in (model, model.get_decoder()):
        monkeypatch.setattr(module, "forward", lambda *a, **k: pytest.fail("the model ran"))
    return model


def spec_file(folder, content):
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_python_raises_before_the_model_runs(content, message, still, tmp_path) -> None:
    def read() -> CacheSpec:
        return CacheSpec.from_file(spec_file(tmp_path, content))

    loaded = Loaded("tiny", still, TinyProcessor())
    users = (
        lambda: QuantizedCache(still, read()),
        lambda: duotone.enable(still, read()).__enter__(),
        lambda: duotone.plan(still, read(), visual_tokens=16, text_tokens=10),
        lambda: evaluate(still, TinyProcessor(), TINY_TASK, {"mine": read()}, 2),
        lambda: compare(loaded, bundled_prompts()[:1], {"mine": read()}),
    )
    for use in users:
        with pytest.raises(ValueError, match=message):
            use()


@pytest.mark.parametrize("command", ["compare", "evaluate", "plan"])
@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_the_command_line_says_it_in_one_line(
    command, content, message, still, tmp_path, monkeypatch
) -> None:
    loaded = Loaded("tiny", still, TinyProcessor())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    monkeypatch.setattr("duotone.loading.load_config", lambda name: still.config)
    asked = ["captions", "-n", "2"] if command == "evaluate" else []
    arguments = [command, *asked, "-s", str(spec_file(tmp_path, content))]
    line = error_of(*arguments)
    assert pytest.raises(ValueError, match=message).matches(ValueError(line))


def test_perplexity_checks_all_schemes_first(monkeypatch) -> None:
    model = text_model()
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("the model ran"))
    passages = Passages((((1, 2, 3),),), 8)
    with pytest.raises(ValueError, match="must lie within"):
        evaluate_perplexity(model, passages, {"deep": duotone.scheme("asymkv", lk=32)})


def test_good_specs_pass_the_same_doors(still, tmp_path) -> None:
    for spec in (TEXT, duotone.scheme("calibquant"), duotone.scheme("kivi")):
        path = spec_file(tmp_path, spec.to_dict())
        assert CacheSpec.from_file(path) == spec
        QuantizedCache(still, CacheSpec.from_file(path))


def test_a_spec_file_has_its_own_bits(tmp_path) -> None:
    path = str(spec_file(tmp_path, TEXT.to_dict()))
    assert "--bits does not go with the spec file" in error_of("plan", "-s", path, "--bits", "2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: duotone.scheme("xquant", eta2=0.7), r"eta must lie in \[0, 0.5\)"),
        (lambda: duotone.scheme("xquant", kq=1.5), "number of layers must be"),
        (lambda: duotone.scheme("asymkv", lv=-1), "number of layers must be"),
        (lambda: CacheSpec(dense_dtype="model"), "no dense_dtype any more; got 'model'"),
    ],
)
def test_knobs_are_checked_too(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
