"""What commands read: texts as tokens, cut into windows that begin as a tokenizer begins a text."""
