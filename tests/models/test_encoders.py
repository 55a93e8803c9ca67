"""Encoders, which weir loads to inspect their attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, BertTokenizer

from weir.errors import WeirError
from weir.loading import is_encoder, load_encoder


def bert(folder: Path, **changes: object) -> BertForMaskedLM:
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
    )
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, **changes}
    model = BertForMaskedLM(BertConfig(vocab_size=6, num_hidden_layers=1, **sizes)).eval()
    model.save_pretrained(folder)
    return model


def test_an_encoder_is_told_from_a_decoder(tmp_path):
    bert(tmp_path)
    assert is_encoder(str(tmp_path))
    assert not is_encoder("nano")
    bert(tmp_path, is_decoder=True)
    assert not is_encoder(str(tmp_path))


def test_an_encoder_is_loaded_without_what_stands_on_it(tmp_path):
    saved = bert(tmp_path)
    model, tokenizer = load_encoder(str(tmp_path), device="cpu")
    ids = torch.tensor([tokenizer("a a")["input_ids"]])
    assert ids.tolist() == [[2, 5, 5, 3]]
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, saved.bert(ids).last_hidden_state)


def test_an_encoder_that_lacks_weights_is_refused(tmp_path):
    saved = bert(tmp_path)
    weights = {k: v for k, v in saved.bert.state_dict().items() if "query" not in k}
    BertModel.save_pretrained(AutoModel.from_config(saved.config), tmp_path, state_dict=weights)
    with pytest.raises(WeirError, match=r"lacks 2 of its weights, such as encoder\.layer\.0"):
        load_encoder(str(tmp_path), device="cpu")
