# Read by llama-cpp-python's build of llama.cpp, right after its project().

# Leaves out the library that llama.cpp's own command-line programs share. It goes into the wheel, nothing there loads
# it, and compiling it takes long. A variable of this name goes before the cached one that the build forces on.
set(LLAMA_BUILD_COMMON OFF)

# The targets with the kernels for CPUs: one, or with GGML_CPU_ALL_VARIANTS one for each generation. Once all are there.
function(disco_cpu_targets found)
  set(targets)
  if(TARGET ggml)
    get_target_property(source ggml SOURCE_DIR)
    get_property(targets DIRECTORY "${source}" PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu(-|$)")
    list(FILTER targets EXCLUDE REGEX "-feats$") # what scores a generation, without kernels
  endif()
  set(${found} ${targets} PARENT_SCOPE)
endfunction()

# What GCC makes of two files' AVX-512 is slower than it could be: benchmarks/compile_options.py compares. The dot products
# of quantised weights are 256 bits wide anyway, and AVX-VNNI has the instruction that counts: they are better off without
# AVX-512. The matrix products profit of asking early for what comes next. Both were tried with GCC 12 on an AMD Zen 5.
function(disco_options_of_files)
  disco_cpu_targets(targets)
  if(NOT targets OR NOT CMAKE_C_COMPILER_ID STREQUAL "GNU")
    return()
  endif()
  list(GET targets 0 target) # all are made in one folder, and a file's options are its folder's
  get_target_property(source ${target} SOURCE_DIR)
  # Any version: the header is right with those that are mended, too.
  set_source_files_properties(
    "${source}/ggml-cpu/amx/mmq.cpp" TARGET_DIRECTORY ${target}
    PROPERTIES COMPILE_OPTIONS "-include;${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_tiles.h"
  )
  if(NOT GGML_NATIVE)
    return()
  endif()
  include(CheckCSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS -march=native)
  check_c_source_compiles(
    "#if !defined(__AVX512F__) || !defined(__AVXVNNI__)\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX_VNNI
  )
  if(DISCO_AVX_VNNI)
    set_source_files_properties(
      "${source}/ggml-cpu/arch/x86/quants.c" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -mno-avx512f
    )
    set_source_files_properties(
      "${source}/ggml-cpu/llamafile/sgemm.cpp" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -fprefetch-loop-arrays
    )
  endif()
endfunction()
cmake_language(DEFER CALL disco_options_of_files) # when all targets are there

# Libraries of their own with kernels are installed beside those that load them.
function(disco_install_variants)
  disco_cpu_targets(targets)
  list(REMOVE_ITEM targets ggml-cpu)
  if(targets AND SKBUILD_PLATLIB_DIR)
    set_target_properties(${targets} PROPERTIES INSTALL_RPATH "$ORIGIN")
    install(TARGETS ${targets} LIBRARY DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
  endif()
endfunction()
cmake_language(DEFER CALL disco_install_variants)

# Two changes to attention on a CPU, whose results stay the same to the bit where heads are no multiple of 128.
#
# With AVX512-FP16 (Intel's Xeons since 2023), ggml goes over 16-bit numbers 128 at a time, and over the rest, which is all
# of a head with 64, one by one, with conversions out of a table: without these instructions it takes 64 at a time.
#
# Each row passes all cells in use, most of which are other sequences': 32 at a time (masked_cells.h says how), in a copy of
# ops.cpp. Where that has not the lines known here, it stays as it is, and is slower. `disco_masked_cells` tells the engine.
function(disco_attention)
  disco_cpu_targets(targets)
  if(NOT targets)
    return()
  endif()
  list(GET targets 0 target)
  get_target_property(source ${target} SOURCE_DIR)
  get_target_property(binary ${target} BINARY_DIR)
  set(ops "${source}/ggml-cpu/ops.cpp")
  file(READ "${ops}" text)
  # One row at a time.
  set(loop "for (int64_t ic = ic_start; ic < ic_end; ++ic) {\n")
  string(CONCAT loop_past
    "            if (mp && (ic = disco_next_seen(mp, ic, ic_end)) == ic_end) {\n"
    "                break;\n"
    "            }\n"
  )
  # Many rows at a time, and 64 cells: whether no row sees one of them.
  set(tile "            if (mask) {\n                bool can_skip = true;\n")
  string(CONCAT tile_past
    "            if (mask) {\n"
    "                bool hidden = true;\n"
    "                for (int tq = 0; tq < tile_rows && hidden; tq++) {\n"
    "                    const ggml_fp16_t * mp = (const ggml_fp16_t *)((const char *) mask->data + (iq1 + tq)*mask->nb[1]"
    " + (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3]);\n"
    "                    hidden = disco_next_seen(mp, ic, ic + kv_tile) == ic + kv_tile;\n"
    "                }\n"
    "                if (hidden) {\n"
    "                    continue;\n"
    "                }\n"
    "            }\n"
  )
  set(known TRUE)
  foreach(lines IN ITEMS loop tile)
    string(FIND "${text}" "${${lines}}" first)
    string(FIND "${text}" "${${lines}}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
      set(known FALSE)
    endif()
  endforeach()
  if(known)
    string(REPLACE "${loop}" "${loop}${loop_past}" text "${text}")
    string(REPLACE "${tile}" "${tile_past}${tile}" text "${text}")
    set(header "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/masked_cells.h")
    set(ops "${binary}/disco/ops.cpp")
    file(CONFIGURE OUTPUT "${ops}" CONTENT "#include \"@header@\"\n@text@" @ONLY)
    foreach(one IN LISTS targets)
      get_target_property(files ${one} SOURCES)
      list(FILTER files EXCLUDE REGEX "(^|/)ggml-cpu/ops\\.cpp$")
      set_property(TARGET ${one} PROPERTY SOURCES ${files} "${ops}")
    endforeach()
  else()
    message(WARNING "ops.cpp is not the one that is known here: attention passes each cell by itself")
  endif()
  if(GGML_NATIVE AND CMAKE_C_COMPILER_ID MATCHES "GNU|Clang")
    include(CheckCSourceCompiles)
    set(CMAKE_REQUIRED_FLAGS -march=native)
    check_c_source_compiles("#ifndef __AVX512FP16__\n#error\n#endif\nint main(void) { return 0; }" DISCO_AVX512_FP16)
    if(DISCO_AVX512_FP16)
      set_source_files_properties(
        "${ops}" "${source}/ggml-cpu/vec.cpp" TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS -mno-avx512fp16
      )
    endif()
  endif()
endfunction()
cmake_language(DEFER CALL disco_attention)
