"""How a server can be asked to go on with a partial answer, by name: for settings, price lists and the server endpoint.

`endpoints.continuation` makes the requests. Only the names are here, because every command reads the settings.
"""

from __future__ import annotations

# Best first. Token ids cannot be cut wrongly, and the text of a rendered prompt is what the model reads. Those that
# send chat messages leave the template to the server.
RAW_METHODS = ("token_ids", "text")
CHAT_METHODS = ("continue_final_message", "prefix", "assistant")
METHODS = RAW_METHODS + CHAT_METHODS
CONTINUATIONS = ("auto", *METHODS, "instruct", "none")
