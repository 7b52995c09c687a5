"""The shipped model files: published sizes, captured at full width, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import plan
from autopar.capture import capture_step
from autopar.cluster import Cluster
from autopar.configs import Wanted, build_model, read_config
from autopar.errors import AutoparError
from autopar.ir.graph import PARAMETER
from autopar.search.analysis import analyse

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"

PUBLISHED = {
    "llama-3-8b": "8.03",
    "llama-3-70b": "70.55",
    "llama-3-405b": "405.85",
    "gpt-3-175b": "174.60",
    "mixtral-8x7b": "46.70",
    "qwen3-235b-a22b": "235.09",
    "deepseek-v3": "671.03",
    "vit-22b": "21.76",
    "t5-11b": "11.31",
}
"""Parameters in 1e9, as the models' papers and cards round them."""

SHALLOW: dict[str, dict[str, Any]] = {
    "gpt-3-175b": {"n_layer": 2},
    "deepseek-v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},
    "t5-11b": {"num_layers": 1, "num_decoder_layers": 1},
}
EXPERTS = ("mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")


def shallow(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A copy of a shipped config with few layers and further changes."""
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    path = tmp_path / f"{name}.json"
    few = SHALLOW.get(name, {"num_hidden_layers": 2})
    path.write_text(json.dumps(content | few | changes))
    return path


def sequence(name: str) -> int | None:
    return None if name.startswith("vit") else 128


def test_every_model_file_is_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_file_has_the_published_parameters(name: str) -> None:
    file = read_config(CONFIGS / f"{name}.json")
    model = build_model(file, Wanted(batch=1, seq=sequence(name))).model
    total = sum(parameter.numel() for parameter in model.parameters())
    assert f"{total / 1e9:.2f}" == PUBLISHED[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_file_is_captured_at_full_width(name: str, tmp_path: Path) -> None:
    wanted = Wanted(batch=16, seq=sequence(name), dtype="bf16")
    made = build_model(read_config(shallow(tmp_path, name)), wanted)
    captured = capture_step(made.model, made.batch, grad=True)
    analysis = analyse(captured.graph)
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert trained == captured.graph.gradients.keys()
    assert len({node.target for node in captured.graph.sources(PARAMETER)}) == len(trained)
    assert all(node.name in analysis.rules for node in captured.graph.nodes if not node.target)


@pytest.mark.large
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_planned_at_dense_costs(name: str, tmp_path: Path) -> None:
    made = build_model(read_config(shallow(tmp_path, name)), Wanted(batch=16, seq=128))
    found = plan(made.model, Cluster.preset("h100", nodes=1), made.batch)
    assert found.prediction.step_s > 0
    assert found.prediction.memory.total_bytes <= found.memory_limit_bytes


# What is refused, and what is told.


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it holds a list, no object"),
        ({"stages": []}, "it is a saved plan; autopar explain shows it"),
        ({"hidden_size": 8}, "it has no 'model_type' (its first keys: 'hidden_size')"),
        ({"model_type": "lama"}, "no model type 'lama'; did you mean 'llama'"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}},
            "'auto_map' asks for code that is not part of transformers",
        ),
        (
            {"model_type": "mine", "trust_remote_code": True},
            "'trust_remote_code' asks for code that is not part of transformers",
        ),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: object, what: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(AutoparError) as raised:
        read_config(path)
    assert what in str(raised.value) and str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="there is no such file; give the path"):
        read_config(tmp_path / "none.json")


SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"architectures": ["LlamaForCausalML"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "cannot make"),
        ({"hidden_act": "loud"}, "loud"),
    ],
)
def test_a_config_of_no_model_is_named(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    path = written(tmp_path, SMALL | changes)
    with pytest.raises(AutoparError) as raised:
        build_model(read_config(path), Wanted(batch=2, seq=8))
    assert what in str(raised.value) and str(path) in str(raised.value)


def test_native_models_need_no_remote_code(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL | {"auto_map": {"AutoModel": "modeling.Other"}})
    made = build_model(read_config(path), Wanted(batch=2, seq=8))
    assert type(made.model).__module__.startswith("transformers.")
    assert made.notes == (
        "the config's 'auto_map' was left out: transformers' own 'llama' is used",
    )


def test_a_config_without_a_class_gets_the_usual_one(tmp_path: Path) -> None:
    content = {key: value for key, value in SMALL.items() if key != "architectures"}
    made = build_model(read_config(written(tmp_path, content)), Wanted(batch=2, seq=8))
    assert type(made.model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("bert", "BertForMaskedLM", (2, 8)),
        ("bart", "BartForConditionalGeneration", (2, 8)),
        ("deit", "DeiTForImageClassification", (2, 3, 224, 224)),
        ("clip", "CLIPForImageClassification", (2, 3, 224, 224)),
        ("resnet", "ResNetForImageClassification", (2, 3, 224, 224)),
    ],
)
def test_models_of_text_and_images_get_a_batch(
    tmp_path: Path, kind: str, name: str, shape: tuple[int, ...]
) -> None:
    file = read_config(written(tmp_path, {"model_type": kind}))
    made = build_model(file, Wanted(batch=2, seq=8 if len(shape) == 2 else None))
    assert type(made.model).__name__ == name
    first = next(iter(made.batch.values()))
    assert isinstance(first, torch.Tensor) and tuple(first.shape) == shape


WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**WIDTHS, "num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 16}
IMAGE = {**WIDTHS, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
SOUND = {
    **TEXT,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
SPEECH = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
AREAS = {
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "num_encoder_blocks": 2,
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "image_size": 32,
}
PAIRS = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "seq"),
    [
        ("bert", "BertForPreTraining", TEXT, 8),
        ("bert", "BertForTokenClassification", TEXT, 8),
        ("bert", "BertForQuestionAnswering", TEXT, 8),
        ("bert", "BertForMultipleChoice", TEXT, 8),
        ("electra", "ElectraForPreTraining", {**TEXT, "embedding_size": 16}, 8),
        ("deberta-v2", "DebertaV2ForSequenceClassification", TEXT, 8),
        ("clip", "CLIPModel", PAIRS, 8),
        ("siglip", "SiglipModel", PAIRS, None),
        ("whisper", "WhisperForConditionalGeneration", SPEECH, 8),
        ("whisper", "WhisperForAudioClassification", SPEECH, None),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", SOUND, 400),
        ("segformer", "SegformerForSemanticSegmentation", AREAS, None),
    ],
)
def test_a_batch_of_any_kind_is_captured(
    tmp_path: Path, kind: str, architecture: str, sizes: dict[str, Any], seq: int | None
) -> None:
    content = {"model_type": kind, "architectures": [architecture], **sizes}
    made = build_model(read_config(written(tmp_path, content)), Wanted(batch=2, seq=seq))
    analyse(capture_step(made.model, made.batch, grad=True).graph)


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "what"),
    [
        ("wav2vec2", "Wav2Vec2ForCTC", SOUND, "is trained by CTC, whose shapes depend"),
        (
            "wav2vec2",
            "Wav2Vec2ForSequenceClassification",
            {**SOUND, "layerdrop": 0.1},
            "'layerdrop' of 0.1 leaves whole layers out by chance, so the step is no fixed graph; "
            "set it to 0",
        ),
        (
            "wav2vec2",
            "Wav2Vec2ForSequenceClassification",
            {**SOUND, "apply_spec_augment": True},
            "'apply_spec_augment' of True masks",
        ),
        ("t5", "T5ForConditionalGeneration", {"num_layers": 1}, "'decoder_start_token_id', which"),
        ("wav2vec2", "Wav2Vec2ForXVector", SOUND, "no model that autopar knows the labels of"),
    ],
)
def test_what_cannot_be_planned_is_said(
    tmp_path: Path, kind: str, architecture: str, sizes: dict[str, Any], what: str
) -> None:
    content = {"model_type": kind, "architectures": [architecture], **sizes}
    with pytest.raises(AutoparError, match=what):
        build_model(read_config(written(tmp_path, content)), Wanted(batch=2, seq=400))


def test_rotary_positions_may_be_exceeded_and_learned_ones_not(tmp_path: Path) -> None:
    made = build_model(read_config(written(tmp_path, SMALL)), Wanted(batch=2, seq=65))
    assert made.notes == ("--seq 65 is beyond the config's max_position_embeddings of 64",)
    learned = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    with pytest.raises(AutoparError, match=r"'transformer.wpe' has 64 positions"):
        build_model(read_config(written(tmp_path, learned)), Wanted(batch=2, seq=65))


def test_sizes_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(AutoparError, match="takes images of the config's size; leave --seq out"):
        build_model(read_config(CONFIGS / "vit-22b.json"), Wanted(batch=2, seq=8))
    with pytest.raises(AutoparError, match="give --seq, tokens of a sample"):
        build_model(read_config(CONFIGS / "llama-3-8b.json"), Wanted(batch=2, seq=None))


def test_the_dtype_is_the_configs_or_the_users(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL | {"dtype": "bfloat16"})

    def dtypes(**wanted: Any) -> set[torch.dtype]:
        model: nn.Module = build_model(read_config(path), Wanted(batch=2, seq=8, **wanted)).model
        return {parameter.dtype for parameter in model.parameters()}

    assert dtypes() == {torch.bfloat16}
    assert dtypes(dtype="fp32") == {torch.float32}
    assert dtypes(real=True) == {torch.float32}
    with pytest.raises(AutoparError, match="cannot use dtype 'int8': there are fp32, bf16, fp16"):
        dtypes(dtype="int8")


def test_equal_recipes_and_others(tmp_path: Path) -> None:
    def recipe(content: object, **wanted: Any) -> str:
        given = {"batch": 2, "seq": 8, **wanted}
        return build_model(read_config(written(tmp_path, content)), Wanted(**given)).recipe

    first = recipe(SMALL)
    assert recipe(dict(reversed(SMALL.items()))) == first
    others = [
        recipe(SMALL | {"rms_norm_eps": 1e-3}),
        recipe(SMALL, batch=4),
        recipe(SMALL, seq=16),
        recipe(SMALL, dtype="bf16"),
    ]
    assert len({first, *others}) == 5
