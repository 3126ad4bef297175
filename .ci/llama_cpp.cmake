# Read by llama-cpp-python's build of llama.cpp, right after its project(): leaves out the library that llama.cpp's own
# command-line programs share. It goes into the wheel, nothing there loads it, and compiling it takes long. A variable of
# this name goes before the cached one that the build forces on.
set(LLAMA_BUILD_COMMON OFF)
