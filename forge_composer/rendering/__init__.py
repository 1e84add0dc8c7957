"""Messages to token ids and back: the chat template, the tool-call format."""
