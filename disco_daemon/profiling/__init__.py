"""What `disco profile` does: measures this machine with its model, and the server, and keeps what came out.

`device` and `server` measure, `prompts` makes what is asked, `saved` is the result and its file, `picture` draws it.
"""
