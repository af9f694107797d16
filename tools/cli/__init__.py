"""What the commands share: how one runs, its errors in words, types of arguments, and the flags of a tokenizer."""
