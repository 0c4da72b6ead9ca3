import math

import pytest
import torch
from tiny import MEMORY, fill_tables, load, save_base

from midus import MidusError, UpscaleConfig, upscale_checkpoint
from midus.evaluation.verify import sample_text, verify

TEXT = " ".join(f"w{4 + i * 7 % 90}" for i in range(40))


def by_hand(a, b, ids):
    with torch.no_grad():
        p, q = (model(ids.unsqueeze(0)).logits[0].double() for model in (a, b))
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean().item()
    nll = [-logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).mean().item() for logits in (p, q)]
    return (p - q).abs().max().item(), kl, math.exp(nll[0]), math.exp(nll[1])


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_is_found_equal(tmp_path, delta, dtype):
    save_base(tmp_path / "base")
    upscale_checkpoint(
        tmp_path / "base", tmp_path / "out", UpscaleConfig(memory=MEMORY), delta=delta
    )
    result = verify(tmp_path / "base", tmp_path / "out", TEXT, window=16, dtype=dtype)
    assert result.max_abs_logit_diff == 0.0
    assert result.mean_kl == 0.0
    assert result.base_perplexity == result.upscaled_perplexity
    assert result.num_tokens == 40
    assert result.dtype == str(dtype).split(".")[1]


def test_a_trained_model_is_measured_as_by_hand(tmp_path):
    save_base(tmp_path / "base")
    upscale_checkpoint(tmp_path / "base", tmp_path / "out", UpscaleConfig(memory=MEMORY))
    trained = fill_tables(load(tmp_path / "out"))
    trained.save_pretrained(tmp_path / "trained")
    result = verify(tmp_path / "base", tmp_path / "trained", TEXT)
    ids = torch.tensor([int(word[1:]) for word in TEXT.split()])
    expected = by_hand(load(tmp_path / "base"), trained, ids)
    found = (
        result.max_abs_logit_diff,
        result.mean_kl,
        result.base_perplexity,
        result.upscaled_perplexity,
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert result.max_abs_logit_diff > 0.1


def test_a_text_of_one_token_is_refused(tmp_path):
    save_base(tmp_path / "base")
    with pytest.raises(MidusError, match="fewer than two tokens"):
        verify(tmp_path / "base", tmp_path / "base", "w5")


def test_the_sample_text_is_packaged():
    assert sample_text().startswith("Call me Ishmael.")
