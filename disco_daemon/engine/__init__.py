"""The engine: a supervised child process that owns llama.cpp, and the daemon's side of it."""
