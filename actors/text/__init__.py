"""Text of many formats to tokens on disk; neither torch nor ray."""
