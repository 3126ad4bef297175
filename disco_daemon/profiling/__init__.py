"""Measurements of `disco profile`: of this machine with its model, and of the server; the figures are kept.

`device` and `server` measure, `watch` looks at the sensors meanwhile, `prompts` makes what is asked, `saved` is the
result and its file, `picture` draws it.
"""
