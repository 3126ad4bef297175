"""What `disco profile` does: measures this machine with its model, and the server, and keeps what came out.

`device` and `server` measure, `watch` looks at the sensors meanwhile, `prompts` makes what is asked, `saved` is the
result and its file, `picture` draws it.
"""
