"""How models write calls of tools: formats, which one a chat template has, their parsers and grammars. Pure."""
