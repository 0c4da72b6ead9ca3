"""A model as the harness asks it, without the work that is the same for every model.

The harness cuts each request into tokens once a model, and each context once a choice; here a text
is cut once a tokenizer. It also reads as many rows at a time however short they are, and fetches
every answer from the device by itself; `tokens_a_row` makes it batches of tokens, as in `rows.py`.
"""

from array import array
from typing import Any

from midus.evaluation.rows import in_batches, log_likelihoods, make_rows

Encoded = dict[tuple[str, Any, Any], "array[int]"]
"""What texts are in tokens, by the text and how it was cut; for models of one tokenizer."""


def make_lm(
    model: Any,
    tokenizer: Any,
    encoded: Encoded,
    *,
    batch_size: int | str,
    max_length: int,
    tokens_a_row: int | None = None,
    mixed_precision_dtype: Any = None,
) -> Any:
    """A language model of the harness.

    Args:
        model: On its device.
        tokenizer: Its tokenizer, with a padding token.
        encoded: What was cut into tokens so far; grows.
        batch_size: The harness's own argument.
        max_length: Tokens a forward pass may see.
        tokens_a_row: Log-likelihoods are read in batches of ``batch_size`` times so many tokens,
            whatever their rows; default: in batches of ``batch_size`` rows.
        mixed_precision_dtype: Of the harness's autocast, which it sets anew for its own passes.
    """
    from lm_eval.models.huggingface import HFLM

    class QuickLM(HFLM):  # type: ignore[misc]  # the harness is untyped
        """The harness's own model class; what it asks and what counts are as there."""

        def tok_encode(
            self,
            string: str,
            add_special_tokens: bool | None = None,
            left_truncate_len: int | None = None,
            **_: Any,
        ) -> list[int]:
            key = string, add_special_tokens, left_truncate_len
            if key not in encoded:
                encoded[key] = array("i", super().tok_encode(*key))
            return encoded[key].tolist()

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **settings: Any) -> list[Any]:
            if tokens_a_row is None:
                return list(super()._loglikelihood_tokens(requests, *args, **settings))
            pairs = []
            for _, context, continuation in requests:
                # As the harness asserts: spaces alone may be no context, and nothing predicts then.
                assert context, "a continuation has no token before it"
                assert 0 < len(continuation) <= max_length, "a continuation does not fit the model"
                excess = len(context) + len(continuation) - (max_length + 1)
                pairs.append((context[max(excess, 0) :], continuation))
            # The longest first: if memory runs out, it does so at once.
            rows = sorted(make_rows(pairs), key=lambda row: -row.num_tokens)
            answers = {}
            for batch in in_batches(rows, self.batch_size * tokens_a_row):
                for request, value, is_greedy in log_likelihoods(self.model, batch):
                    answers[request] = value, is_greedy
            return [answers[i] for i in range(len(pairs))]

    return QuickLM(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=max_length,
        mixed_precision_dtype=mixed_precision_dtype,
        # In the model's own type, bfloat16's log-probabilities would have three digits.
        softmax_dtype="float32",
    )
