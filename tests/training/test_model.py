"""The policy is the model that transformers reads from the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge_composer.training.attention import DocumentSpans, document_spans
from forge_composer.training.lm_head import HeadWeight
from forge_composer.training.model import model_config, resolve_attention
from forge_composer.training.policy_trainer import PolicyTrainer
from forge_composer.types import ScoreRequest
from tests.training.training_fixtures import VOCAB, one_rank


def logits_reader(hidden_ND: Tensor, held: HeadWeight) -> tuple[Tensor, ...]:
    return (F.linear(hidden_ND, held.weight_VD),)


def logits_of(trainer: PolicyTrainer, ids_BL: Tensor, positions_BL: Tensor) -> Tensor:
    masks = trainer.model.get_attention_masks(positions_BL)
    everywhere = torch.arange(ids_BL.numel())
    with torch.no_grad():
        (logits,) = trainer.model(
            ids_BL,
            positions_BL=positions_BL,
            attention_masks=masks,
            select_N=everywhere,
            reader=logits_reader,
        )
    return logits.view(*ids_BL.shape, -1)


def random_ids(*shape: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(0))


def edited_copy(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | changes))
    return target


@pytest.fixture(scope="module")
def untied_dir(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_dir: Path) -> Path:
    """Another size: 3 layers, untied, another theta and norm epsilon, head size unequal hidden / heads."""
    folder = tmp_path_factory.mktemp("untied")
    config = Qwen3Config(
        vocab_size=130,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_logits_equal_transformers(name: str, tiny_qwen3_dir: Path, untied_dir: Path) -> None:
    folder = tiny_qwen3_dir if name == "tied" else untied_dir
    reference = Qwen3ForCausalLM.from_pretrained(folder).eval()
    ids = random_ids(3, 50, vocab=130)
    with torch.no_grad():
        expected = reference(ids).logits
    with one_rank(folder) as trainer:
        actual = logits_of(trainer, ids, torch.arange(50).expand(3, -1))
        assert trainer.num_parameters == reference.num_parameters()
    assert expected.std() > 0.05
    torch.testing.assert_close(actual, expected, atol=5e-6, rtol=1e-5)


def test_packed_equals_separate(tiny_qwen3_dir: Path) -> None:
    """Documents in one row, and padding behind them, do not see each other."""
    reference = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir).eval()
    lengths = [7, 20, 1, 13]
    ids = random_ids(1, 48)
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(7).long()])
    with one_rank(tiny_qwen3_dir) as trainer:
        packed = logits_of(trainer, ids, positions[None])[0]
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        with torch.no_grad():
            expected = reference(ids[:, piece]).logits[0]
        torch.testing.assert_close(packed[piece], expected, atol=5e-6, rtol=1e-5)
        start += length
    with torch.no_grad():
        unmasked = reference(ids).logits[0]
    assert (packed[8:27] - unmasked[8:27]).abs().max() > 1e-2  # the comparison can fail


def test_document_spans() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 0, 0]])
    assert document_spans(positions) == DocumentSpans(
        lengths=(3, 2, 3, 4, 2), single_tokens=(False, False, True, False, True)
    )


def test_score_is_log_softmax(tiny_qwen3_dir: Path) -> None:
    """At each request's own temperature, for any lengths, also beyond `trainer.seq_len`."""
    reference = Qwen3ForCausalLM.from_pretrained(tiny_qwen3_dir).eval()
    lengths, temperatures = [5, 30, 1, 17, 2, 100], [1.0, 0.5, 1.0, 2.0, 1.0, 1.0]
    requests = [
        ScoreRequest(tuple(random_ids(length).tolist()), temperature)
        for length, temperature in zip(lengths, temperatures, strict=True)
    ]
    with one_rank(tiny_qwen3_dir, rows_per_microbatch=2) as trainer:
        scores = trainer.score(requests)
        assert trainer.score([]) == []
        with pytest.raises(ValueError, match="3000 tokens, the model has 2048 positions"):
            trainer.score([ScoreRequest((1,) * 3000)])
    for request, score in zip(requests, scores, strict=True):
        ids = torch.tensor([request.token_ids])
        assert len(score) == ids.shape[1] - 1
        with torch.no_grad():
            logprobs = torch.log_softmax(reference(ids).logits[0, :-1] / request.temperature, dim=-1)
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_weights_round_trip_bitwise(
    name: str, tiny_qwen3_dir: Path, untied_dir: Path, tmp_path: Path
) -> None:
    """Folder -> shards -> folder: the same names and bits; the export is a folder transformers loads."""
    folder = tiny_qwen3_dir if name == "tied" else untied_dir
    original = load_file(folder / "model.safetensors")
    with one_rank(folder) as trainer:
        state = trainer.hf_state_dict(torch.float32)
        halves = trainer.hf_state_dict(torch.bfloat16)
        trainer.export_hf(tmp_path / "export")
        trainer.export_hf(tmp_path / "export")  # replaces
    assert state is not None
    assert halves is not None
    assert state.keys() == original.keys()
    assert ("lm_head.weight" in state) == (name == "untied")
    assert all(torch.equal(state[key], original[key]) for key in original)
    assert all(torch.equal(halves[key], original[key].bfloat16()) for key in original)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[key], original[key]) for key in original)
    ids = random_ids(1, 20, vocab=130)
    with torch.no_grad():
        logits = [
            Qwen3ForCausalLM.from_pretrained(path)(ids).logits for path in (folder, tmp_path / "export")
        ]
    assert torch.equal(*logits)
    others = {file.name for file in folder.iterdir() if file.suffix != ".safetensors"}
    assert {file.name for file in (tmp_path / "export").iterdir()} == others | {"model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_published_weights_are_a_copy(tiny_qwen3_dir: Path) -> None:
    """What was handed out does not change with the next step."""
    with one_rank(tiny_qwen3_dir) as trainer:
        state = trainer.hf_state_dict(torch.float32)
        assert state is not None
        before = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(2.0)
        assert all(torch.equal(state[name], before[name]) for name in before)
        after = trainer.hf_state_dict(torch.float32)
        assert after is not None
        assert torch.equal(after["model.norm.weight"], before["model.norm.weight"] * 2)


def test_bfloat16_folder_becomes_float32_masters(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """A bfloat16 checkpoint is trained in float32 and exported in bfloat16, bit for bit if untouched."""
    folder = edited_copy(tiny_qwen3_dir, tmp_path / "bf16", dtype="bfloat16")
    halves = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    with one_rank(folder) as trainer:
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        trainer.export_hf(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[key], halves[key]) for key in halves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope type 'yarn'"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads = 3 \(trainer.parallelism.tp = 2 must divide it\)",
        ),
    ],
)
def test_other_models_are_refused(
    changes: dict[str, Any], message: str, tiny_qwen3_dir: Path, tmp_path: Path
) -> None:
    folder = edited_copy(tiny_qwen3_dir, tmp_path / "other", **changes)
    with pytest.raises(ValueError, match=message):
        model_config(folder, attention="dense", tp=2)


def test_weights_that_do_not_fit_are_refused(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    folder = edited_copy(tiny_qwen3_dir, tmp_path / "more_layers", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"safetensors in .* do not fit"), one_rank(folder):
        pass


def test_attention_by_device() -> None:
    assert resolve_attention("auto", "cpu") == "dense"
    assert resolve_attention("auto", "cuda") == "flex"
    assert resolve_attention("varlen", "cuda") == "varlen"
    with pytest.raises(ValueError, match=r"model\.attention = 'flex' needs CUDA"):
        resolve_attention("flex", "cpu")
