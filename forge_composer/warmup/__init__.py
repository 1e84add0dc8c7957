"""The tiny policy: its tokenizer, its synthetic traces and its supervised warm-up."""
