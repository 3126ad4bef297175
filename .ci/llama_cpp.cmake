# Read by llama-cpp-python's build of llama.cpp, right after its project().

# Leaves out the library that llama.cpp's own command-line programs share. It goes into the wheel, nothing there loads
# it, and compiling it takes long. A variable of this name goes before the cached one that the build forces on.
set(LLAMA_BUILD_COMMON OFF)

# What GCC makes of two files' AVX-512 is slower than it could be: benchmarks/compile_options.py compares. The dot products
# of quantised weights are 256 bits wide anyway, and AVX-VNNI has the instruction that counts: they are better off without
# AVX-512. The matrix products profit of asking early for what comes next. Both were tried with GCC 12 on an AMD Zen 5.
function(disco_options_of_files)
  if(NOT TARGET ggml-cpu OR NOT GGML_NATIVE OR NOT CMAKE_C_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  get_target_property(source ggml-cpu SOURCE_DIR)
  # Any version: the header is right with those that are mended, too.
  set_source_files_properties(
    "${source}/ggml-cpu/amx/mmq.cpp" TARGET_DIRECTORY ggml-cpu
    PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_tiles.h"
  )
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -march=native)
  check_c_source_compiles(
    "#if !defined(__AVX512F__) || !defined(__AVXVNNI__)\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX_VNNI
  )
  if(DISCO_AVX_VNNI)
    set_source_files_properties(
      "${source}/ggml-cpu/arch/x86/quants.c" TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_OPTIONS -mno-avx512f
    )
    set_source_files_properties(
      "${source}/ggml-cpu/llamafile/sgemm.cpp" TARGET_DIRECTORY ggml-cpu PROPERTIES COMPILE_OPTIONS -fprefetch-loop-arrays
    )
  endif()
endfunction()
cmake_language(DEFER CALL disco_options_of_files) # when all targets are there
