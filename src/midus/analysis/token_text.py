"""Tokens as text, as the analyses show them."""

from typing import Any


def token_text(tokenizer: Any, token: int) -> str:
    """One token as a reader knows it: with its leading blank, its bytes named if they are half."""
    piece: str | None = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # vocabularies are padded beyond what their tokenizers know
        return f"<{token}>"
    if piece.startswith("▁"):  # SentencePiece, whose decoder drops a blank at the start
        return piece.replace("▁", " ")
    text = text_of(tokenizer, [token])
    return piece if not text or "\ufffd" in text else text


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """Tokens as text, blanks and special tokens as they are."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""
