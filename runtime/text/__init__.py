"""Text and token ids: tokenizer, chat templates, thinking marks."""
