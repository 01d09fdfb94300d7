"""Names and text that users, files or models gave, made safe to show."""

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Escape control characters, so that text from a model or user cannot control the terminal."""
    return text.translate(CONTROLS)
